"""Grouped products of 8-bit integers by a kernel for TPUs, which quantises rows as it reads them."""

from functools import partial

import jax
import jax.numpy as jnp

from gregale.model.kernels.grouped import GroupedProducts
from gregale.model.kernels.grouped_int8 import LARGEST, SMALLEST, Integers
from gregale.model.kernels.tpu.grouped import MEGABLOX
from gregale.model.kernels.tpu.visits import visited


def grouped_int8(cores: int) -> GroupedProducts:
    """Return the products for chips whose cores share tiles of outputs."""
    return GroupedProducts(partial(int8_product, cores=cores), MEGABLOX.weight_gradients)


@partial(jax.jit, static_argnames=("transposed", "cores"))
def int8_product(
    rows: jax.Array, weights: Integers, sizes: jax.Array, transposed: bool = False, cores: int = 1
) -> jax.Array:
    """Multiply integers. A block has all inputs of its rows, because their largest is the scale."""
    of_inputs, outputs = weights.of_inputs(transposed), 1 if transposed else 2

    def term(x, numbers, scale) -> jax.Array:
        exact, contracted = x[...].astype(jnp.float32), ((1,), (1 if transposed else 0,))
        if of_inputs:
            exact = exact * scale[...]
        most = jnp.maximum(jnp.max(jnp.abs(exact), axis=1, keepdims=True), SMALLEST)
        left = jnp.round(exact * (LARGEST / most)).astype(jnp.int8)
        sums = jax.lax.dot_general(left, numbers[...], (contracted, ((), ())), preferred_element_type=jnp.int32)
        found = sums.astype(jnp.float32) * (most / LARGEST)
        return found if of_inputs else found * scale[...]

    scale = weights.scale.reshape(sizes.shape[0], 1, -1), None if of_inputs else 2
    return visited(term, [((rows, None), (weights.numbers, outputs), scale)], sizes, cores)
