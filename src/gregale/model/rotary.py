"""Rotary position embeddings (RoFormer, arXiv 2104.09864), with scaled frequencies."""

from __future__ import annotations

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.model.config import LlamaConfig
from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.reference import PLAIN
from gregale.model.layer_kinds import Kind
from gregale.model.scaling import RotaryScaling


def frequencies(half_size: int, base: float, scaling: RotaryScaling | None) -> np.ndarray:
    """Return the radians per position of each channel pair: `base ** (-i / half_size)`, float32 [half].

    With `scaling`, the part of a frequency that is not kept is divided by `factor`.
    """
    frequency = base ** (-np.arange(half_size, dtype=np.float64) / half_size)
    if scaling is not None:
        kept = scaling.kept(frequency)
        frequency = kept * frequency + (1 - kept) * frequency / scaling.factor
    return frequency.astype(np.float32)


def rotate(
    x: NamedArray, positions: NamedArray, config: LlamaConfig, kernels: Kernels = PLAIN, kind: Kind = 0
) -> NamedArray:
    """Turn channel pairs (i, i + half) of `x` by position * frequency_i; computed in float32.

    - `x`: [..., position, ..., head_size]
    - `positions`: integer positions, on axes that `x` has
    - `kind`: the layer's kind, which has the base and the scaling
    """
    HeadSize = config.HeadSize
    of_kinds = [frequencies(HeadSize.size // 2, each.rotary_base, each.rotary_scaling) for each in config.kinds]
    frequency = jnp.stack(of_kinds)[kind.array] if isinstance(kind, NamedArray) else jnp.asarray(of_kinds[kind])
    others = x.rearrange((..., HeadSize)).axes[:-1]
    # Add axes of size 1 for axes of x that `positions` lacks: broadcast by name would store the sines for each head.
    shared = [axis for axis in others if axis in positions.axes]
    sizes = [axis.size if axis in shared else 1 for axis in others]
    angle = positions.rearrange(shared).array.reshape(*sizes, 1).astype(jnp.float32) * frequency
    turned = kernels.rotate(x.rearrange((..., HeadSize)).array, angle)
    return hax.named(turned, (*others, HeadSize)).rearrange(x.axes)
