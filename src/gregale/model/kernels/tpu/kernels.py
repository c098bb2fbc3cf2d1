"""The operations with XLA:TPU's rules of differentiation."""

from __future__ import annotations

from dataclasses import replace

from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.plain import PLAIN
from gregale.model.kernels.tpu.rotary import rotate
from gregale.model.kernels.tpu.swiglu import swiglu


def tpu_kernels() -> Kernels:
    return replace(PLAIN, rules="tpu", swiglu=swiglu, rotate=rotate)
