"""The operations with differentiation rules for XLA:CPU."""

from __future__ import annotations

import jax

from gregale.model.kernels.cpu.attention import attend
from gregale.model.kernels.cpu.norm import rms_norm
from gregale.model.kernels.cpu.projection import project
from gregale.model.kernels.cpu.rotary import rotate
from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.reference import geglu
from gregale.model.kernels.swiglu import swiglu_with

SWIGLU = swiglu_with(jax.lax.optimization_barrier)


def cpu_kernels() -> Kernels:
    return Kernels(
        rules="cpu",
        attention="blocked",
        opaque=False,
        project=project,
        swiglu=SWIGLU,
        geglu=geglu,
        rms_norm=rms_norm,
        rotate=rotate,
        attend=attend,
    )
