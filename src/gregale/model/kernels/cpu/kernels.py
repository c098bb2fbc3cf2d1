"""The operations with XLA:CPU's rules of differentiation."""

from __future__ import annotations

from gregale.model.kernels.cpu.attention import attend
from gregale.model.kernels.cpu.norm import rms_norm
from gregale.model.kernels.cpu.projection import project
from gregale.model.kernels.cpu.rotary import rotate
from gregale.model.kernels.cpu.swiglu import swiglu
from gregale.model.kernels.kernels import Kernels


def cpu_kernels() -> Kernels:
    return Kernels(
        rules="cpu",
        attention="blocked",
        opaque=False,
        project=project,
        swiglu=swiglu,
        rms_norm=rms_norm,
        rotate=rotate,
        attend=attend,
    )
