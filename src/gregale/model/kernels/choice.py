"""Which form of the operations a platform gets."""

from __future__ import annotations

import jax.numpy as jnp

from gregale.model.kernels.cpu.kernels import cpu_kernels
from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.plain import plain_kernels


def kernels_for(platform: str, rules: str, attention: str, dtype: jnp.dtype) -> Kernels:
    """The operations for a platform (`cpu`, `gpu`, `tpu`).

    Arguments:
    - `rules`: `auto` (the platform's own, if it has any) or `plain`
    - `attention`: `auto` (the platform's fastest), `xla` or `cudnn`
    - `dtype`: of activations; cuDNN has none in float32
    """
    if platform == "cpu" and rules == "auto" and attention != "cudnn":
        return cpu_kernels(blocked=attention == "auto")
    fast = platform == "gpu" and dtype != jnp.float32
    chosen = ("cudnn" if fast else "xla") if attention == "auto" else attention
    return plain_kernels("cudnn" if chosen == "cudnn" else "xla")
