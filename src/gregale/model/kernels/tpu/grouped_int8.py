"""Grouped products of 8-bit integers by kernels for TPUs, which quantise rows as they read them.

A step of a kernel visits a block of rows for one group, as in megablox, whose order of visits it takes. A block that
several groups share is visited once for each, and only the group's own rows count.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from gregale.model.kernels.grouped import GroupedProducts
from gregale.model.kernels.grouped_int8 import LARGEST, SMALLEST, Integers
from gregale.model.kernels.tpu.eight_bits import MEMORY
from gregale.model.kernels.tpu.grouped import LANES, ROWS, filled, tiles


@partial(jax.jit, static_argnames="transposed")
def int8_product(rows: jax.Array, weights: Integers, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """A block has all inputs of its rows, because their largest is the scale."""
    inputs, outputs = weights.numbers.shape[:0:-1] if transposed else weights.numbers.shape[1:]
    of_inputs, (_, _, wide) = weights.of_inputs(transposed), tiles(inputs, outputs)

    def body(own, first, last, x, numbers, scale, out):
        exact = x[...].astype(jnp.float32)
        if of_inputs:
            exact = exact * scale[...]
        most = jnp.maximum(jnp.max(jnp.abs(exact), axis=1, keepdims=True), SMALLEST)
        left = jnp.round(exact * (LARGEST / most)).astype(jnp.int8)
        contracted = ((1,), (1 if transposed else 0,)), ((), ())
        sums = jax.lax.dot_general(left, numbers[...], contracted, preferred_element_type=jnp.int32)
        found = sums.astype(jnp.float32) * (most / LARGEST)
        if not of_inputs:
            found = found * scale[...]
        out[...] = jnp.where(own, found, out[...].astype(jnp.float32)).astype(out.dtype)

    x, scale = filled(rows), weights.scale.reshape(sizes.shape[0], 1, -1)
    given = [
        (x, (ROWS, inputs), lambda part, block, group: (block, 0)),
        (weights.numbers, (None, wide, inputs), lambda part, block, group: (group, part, 0))
        if transposed
        else (weights.numbers, (None, inputs, wide), lambda part, block, group: (group, 0, part)),
        (scale, (None, 1, inputs), lambda part, block, group: (group, 0, 0))
        if of_inputs
        else (scale, (None, 1, wide), lambda part, block, group: (group, 0, part)),
    ]
    out = (x.shape[0], outputs), rows.dtype, (ROWS, wide), lambda part, block, group: (block, part)
    return _over_visits(body, (-(-outputs // wide),), sizes, given, out)[: rows.shape[0]]


@jax.jit
def int8_weight_gradients(rows: jax.Array, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
    """Add integers of 32 bits; the scales of columns need a pass over the rows before."""
    inputs, outputs = rows.shape[1], cotangents.shape[1]
    _, high, wide = tiles(inputs, outputs)
    x, y = filled(rows), filled(cotangents)

    def body(own, first, last, x, y, most_x, most_y, out, sums):
        @pl.when(first)
        def _():
            sums[...] = jnp.zeros_like(sums)

        left, right = (
            jnp.round(each[...].astype(jnp.float32) * (LARGEST / most[...]))
            for each, most in ((x, most_x), (y, most_y))
        )
        left = jnp.where(own, left, 0).T.astype(jnp.int8)
        sums[...] += jnp.dot(left, right.astype(jnp.int8), preferred_element_type=jnp.int32)

        @pl.when(last)
        def _():
            by_left, by_right = most_x[...].T / LARGEST, most_y[...] / LARGEST
            out[...] = (sums[...].astype(jnp.float32) * by_left * by_right).astype(out.dtype)

    given = [
        (x, (ROWS, high), lambda across, down, block, group: (block, down)),
        (y, (ROWS, wide), lambda across, down, block, group: (block, across)),
        (largest_of_groups(x, sizes), (None, 1, high), lambda across, down, block, group: (group, 0, down)),
        (largest_of_groups(y, sizes), (None, 1, wide), lambda across, down, block, group: (group, 0, across)),
    ]
    shape = sizes.shape[0], inputs, outputs
    out = shape, rows.dtype, (None, high, wide), lambda across, down, block, group: (group, down, across)
    tiled = -(-outputs // wide), -(-inputs // high)
    return _over_visits(body, tiled, sizes, given, out, [pltpu.VMEM((high, wide), jnp.int32)])


@jax.jit
def largest_of_groups(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the largest absolute value in each column of each group, [groups, 1, n]."""

    def body(own, first, last, x, out):
        found = jnp.max(jnp.where(own, jnp.abs(x[...].astype(jnp.float32)), SMALLEST), axis=0, keepdims=True)
        out[...] = jnp.where(first, found, jnp.maximum(out[...], found))

    shape, wide = (sizes.shape[0], 1, x.shape[1]), -(-x.shape[1] // (2 * LANES)) * LANES
    out = shape, jnp.float32, (None, 1, wide), lambda part, block, group: (group, 0, part)
    given = [(x, (ROWS, wide), lambda part, block, group: (block, part))]
    return _over_visits(body, (-(-x.shape[1] // wide),), sizes, given, out)


def _over_visits(body: Callable, tiled: Sequence[int], sizes: jax.Array, inputs, out, scratch=()) -> jax.Array:
    """Run a kernel over tiles, and over the visits of blocks of rows for each tile.

    - `body(own, first, last, *arrays)`: the rows of the visit's group [ROWS, 1]; whether the visit is its first or last
    - `inputs`: (array, block, place), the first of rows; `out`: (shape, dtype, block, place)
    - `place(*tiles, block of rows, group)`
    """
    (shape, dtype, *written), groups = out, sizes.shape[0]
    visits, count = make_group_metadata(
        group_sizes=sizes,
        m=inputs[0][0].shape[0],
        tm=ROWS,
        start_group=jnp.int32(0),
        num_nonzero_groups=groups,
        visit_empty_groups=len(shape) == 3,  # their results are zeros
    )
    outer = len(tiled)

    def run(starts, groups, blocks, *arrays) -> None:
        visit, end = pl.program_id(outer), pl.num_programs(outer) - 1
        group = groups[visit]
        row = blocks[visit] * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
        own = (row >= starts[group]) & (row < starts[group + 1])
        first = (visit == 0) | (groups[jnp.maximum(visit - 1, 0)] != group)
        last = (visit == end) | (groups[jnp.minimum(visit + 1, end)] != group)
        body(own, first, last, *arrays)

    def spec(block, place) -> pl.BlockSpec:
        def at(*indices):
            *tiles, visit, _, groups, blocks = indices
            return place(*tiles, blocks[visit], groups[visit])

        return pl.BlockSpec(block, at)

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=[spec(*each) for _, *each in inputs],
            out_specs=spec(*written),
            grid=(*tiled, count),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * outer), vmem_limit_bytes=MEMORY
        ),
    )(*visits, *(x for x, *_ in inputs))


MEGABLOX_INT8 = GroupedProducts(int8_product, int8_weight_gradients)
