"""Grouped products of 8-bit integers: those of `quantised_product`, for the rows of each group alone.

For a row r of the group g, with the rounding and the scales of `gregale.model.kernels.quantised`:

    x[r] = sx[r] X[r],  w[g] = W[g] sw[g]     y[r]  = sx[r] sw[g] (X[r] . W[g])
    dy[r] sw[g] = sa[r] A[r]                  dx[r] = sa[r] (A[r] . W[g]^T)

Gradients of weights are products in the compute dtype. Their integers would have scales of columns, the largest values
of a group's rows. By the TPU compiler the passes for these take longer than the faster products save.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis

from gregale.model.kernels.grouped import BLOCKED, GroupedProducts, of_groups
from gregale.model.kernels.quantised import PART, SMALLEST, EightBits, Quantised, Weight, int8_quantise

LARGEST = 127.0


class Integers(NamedTuple):
    """The weights of groups in 8 bits."""

    numbers: jax.Array  # [groups, a, b]
    scale: jax.Array  # float32, of size 1 on a device in the axis that the forward pass contracts

    def of_inputs(self, transposed: bool) -> bool:
        """Return whether a product contracts the axis of the scales, as that for the gradient by rows does."""
        return self.scale.shape[2 if transposed else 1] > 1


def integers_of(how: Quantised, weight: Weight, order: Sequence[str]) -> Integers:
    """Return the integers of a weight [groups, inputs, outputs], and their scales, with the axes in an order."""
    groups, inputs, outputs = weight.axis_names
    if not isinstance(weight, EightBits):
        weight = int8_quantise(how, weight, weight, [inputs], {})
    numbers = how.joined(weight.numbers, weight.axis_names).rearrange(order)
    scale, part = how.joined(weight.scale, [groups, outputs]), inputs + PART
    if part not in scale.axis_names:
        scale = scale.broadcast_axis(Axis(part, 1))
    return Integers(numbers.array, scale.rearrange([part if name == inputs else name for name in order]).array)


def product(rows: jax.Array, weights: Integers, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiply integers in float32: sums are exact up to 2^24."""
    scale = of_groups(weights.scale.reshape(sizes.shape[0], -1), sizes, rows.shape[0])
    exact, of_inputs = rows.astype(jnp.float32), weights.of_inputs(transposed)
    if of_inputs:
        exact = exact * scale
    most = jnp.maximum(jnp.abs(exact).max(-1, keepdims=True), SMALLEST)
    left = jnp.round(exact * (LARGEST / most))
    found = BLOCKED.product(left, weights.numbers.astype(jnp.float32), sizes, transposed) * (most / LARGEST)
    return (found if of_inputs else found * scale).astype(rows.dtype)


BLOCKED_INT8 = GroupedProducts(product, BLOCKED.weight_gradients)
