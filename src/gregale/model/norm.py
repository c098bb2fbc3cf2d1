"""RMSNorm over a named axis."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class RmsNorm(eqx.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467); all but the product with the weight in float32.

    Haliax's own broadcasts the root and the weight to the shape of `x` before it multiplies by them, and the backward
    pass then keeps both in that shape. Here they have axes of size 1.
    """

    weight: NamedArray  # [Over]
    epsilon: float = eqx.field(static=True)

    @staticmethod
    def init(Over: Axis, epsilon: float) -> RmsNorm:
        return RmsNorm(hax.ones(Over), epsilon)

    def __call__(self, x: NamedArray) -> NamedArray:
        """[..., Over] -> the same, in the dtype of `x`."""
        x = x.rearrange((..., *self.weight.axes))
        exact = x.array.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + self.epsilon)
        normalised = (exact * inverse).astype(x.dtype) * self.weight.array.astype(x.dtype)
        return NamedArray(normalised, x.axis_names)
