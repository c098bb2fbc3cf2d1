"""Grouped products of 8-bit integers by a kernel for TPUs, which quantises rows as it reads them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from gregale.model.kernels.grouped import GroupedProducts
from gregale.model.kernels.grouped_int8 import LARGEST, SMALLEST, Integers
from gregale.model.kernels.tpu.eight_bits import MEMORY
from gregale.model.kernels.tpu.grouped import LANES, MEGABLOX, ROWS, filled, tile

BLOCK = 2**22  # bytes of a block of weights at most


def grouped_int8(cores: int) -> GroupedProducts:
    """Return the products for chips whose cores share tiles of outputs."""
    return GroupedProducts(partial(int8_product, cores=cores), MEGABLOX.weight_gradients)


@partial(jax.jit, static_argnames=("transposed", "cores"))
def int8_product(
    rows: jax.Array, weights: Integers, sizes: jax.Array, transposed: bool = False, cores: int = 1
) -> jax.Array:
    """Visit a block of rows for one group after another, as megablox does; only the group's own rows are written.

    A block has all inputs of its rows, because their largest is the scale, and each tile of outputs quantises it again.
    """
    inputs, outputs = weights.numbers.shape[:0:-1] if transposed else weights.numbers.shape[1:]
    of_inputs, x = weights.of_inputs(transposed), filled(rows)
    wide = tile(outputs, max(LANES, min(outputs // cores, BLOCK // inputs)))
    visits, count = make_group_metadata(
        group_sizes=sizes,
        m=x.shape[0],
        tm=ROWS,
        start_group=jnp.int32(0),
        num_nonzero_groups=sizes.shape[0],
        visit_empty_groups=False,
    )

    def run(starts, groups, blocks, x, numbers, scale, out) -> None:
        exact, contracted = x[...].astype(jnp.float32), ((1,), (1 if transposed else 0,))
        if of_inputs:
            exact = exact * scale[...]
        most = jnp.maximum(jnp.max(jnp.abs(exact), axis=1, keepdims=True), SMALLEST)
        left = jnp.round(exact * (LARGEST / most)).astype(jnp.int8)
        sums = jax.lax.dot_general(left, numbers[...], (contracted, ((), ())), preferred_element_type=jnp.int32)
        found = sums.astype(jnp.float32) * (most / LARGEST)
        if not of_inputs:
            found = found * scale[...]
        visit = pl.program_id(1)
        row = blocks[visit] * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
        own = (row >= starts[groups[visit]]) & (row < starts[groups[visit] + 1])
        out[...] = jnp.where(own, found, out[...].astype(jnp.float32)).astype(out.dtype)

    def spec(block, place) -> pl.BlockSpec:
        """`place(part of the outputs, block of rows, group)`"""
        return pl.BlockSpec(block, lambda part, visit, _, groups, blocks: place(part, blocks[visit], groups[visit]))

    if transposed:
        matrix = spec((None, wide, inputs), lambda part, block, group: (group, part, 0))
    else:
        matrix = spec((None, inputs, wide), lambda part, block, group: (group, 0, part))
    if of_inputs:
        scales = spec((None, 1, inputs), lambda part, block, group: (group, 0, 0))
    else:
        scales = spec((None, 1, wide), lambda part, block, group: (group, 0, part))
    found = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=[spec((ROWS, inputs), lambda part, block, group: (block, 0)), matrix, scales],
            out_specs=spec((ROWS, wide), lambda part, block, group: (block, part)),
            grid=(-(-outputs // wide), count),
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), rows.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MEMORY),
    )(*visits, x, weights.numbers, weights.scale.reshape(sizes.shape[0], 1, -1))
    return found[: rows.shape[0]]
