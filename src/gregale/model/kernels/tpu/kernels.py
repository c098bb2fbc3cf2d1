"""The operations with differentiation rules for XLA:TPU."""

from __future__ import annotations

from dataclasses import replace

from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.reference import PLAIN
from gregale.model.kernels.swiglu import swiglu_with
from gregale.model.kernels.tpu.rotary import rotate

# XLA:TPU else makes the gradients again inside of each of the four products that take them, which costs every one of
# these a third of its time, and has a pass over gate and up for one of them besides.
SWIGLU = swiglu_with(tuple)


def tpu_kernels() -> Kernels:
    return replace(PLAIN, rules="tpu", swiglu=SWIGLU, rotate=rotate)
