"""Kernels for TPU that visit a block of rows for one group after another, as megablox does. They import Pallas."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from gregale.model.kernels.grouped import GroupedProducts
from gregale.model.kernels.grouped_int8 import Integers
from gregale.model.kernels.tpu.blocks import LANES
from gregale.model.kernels.tpu.grouped import MEGABLOX, ROWS, filled, tile
from gregale.model.kernels.tpu.products import LARGEST, MEMORY, SMALLEST

BLOCK = 3 * 2**20  # bytes of a block of weights at most: v4 has 16 MiB, and two terms have four blocks

Operand = tuple[jax.Array, int | None]


def visited(
    term: Callable[..., jax.Array], terms: Sequence[Sequence[Operand]], sizes: jax.Array, cores: int
) -> jax.Array:
    """Return the sum of terms, [rows, outputs], in the dtype of the rows. A visit writes the rows of its group alone.

    - `term(rows, weights, ...)`: of the blocks of a visit, float32 [ROWS, tile of outputs]
    - `terms`: arrays, each with the axis of its outputs or None: [rows, inputs], [groups, a, b] ...
    - `cores`: those of the chip, which share tiles of outputs
    """
    operands = [each for one in terms for each in one]
    rows, (weights, axis) = terms[0][0][0], terms[0][1]
    assert axis is not None
    outputs, inputs = weights.shape[axis], rows.shape[1]
    wide = tile(outputs, max(LANES, min(outputs // cores, BLOCK // (inputs * weights.dtype.itemsize))))
    arrays = [filled(array) if array.ndim == 2 else array for array, _ in operands]
    visits, count = make_group_metadata(
        group_sizes=sizes,
        m=arrays[0].shape[0],
        tm=ROWS,
        start_group=jnp.int32(0),
        num_nonzero_groups=sizes.shape[0],
        visit_empty_groups=False,
    )

    def run(starts, groups, blocks, *refs) -> None:
        out, each = refs[-1], len(terms[0])
        found = sum(term(*refs[at : at + each]) for at in range(0, len(operands), each))
        visit = pl.program_id(1)
        row = blocks[visit] * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
        own = (row >= starts[groups[visit]]) & (row < starts[groups[visit] + 1])
        out[...] = jnp.where(own, found, out[...].astype(jnp.float32)).astype(out.dtype)

    def spec(array: jax.Array, axis: int | None) -> pl.BlockSpec:
        if array.ndim == 2:
            return pl.BlockSpec((ROWS, inputs), lambda part, visit, _, groups, blocks: (blocks[visit], 0))
        block = None, *(wide if at == axis else array.shape[at] for at in (1, 2))
        own = [at == axis for at in (1, 2)]
        return pl.BlockSpec(
            block, lambda part, visit, _, groups, blocks: (groups[visit], *(part * each for each in own))
        )

    found = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=[spec(*each) for each in operands],
            out_specs=pl.BlockSpec((ROWS, wide), lambda part, visit, _, groups, blocks: (blocks[visit], part)),
            grid=(-(-outputs // wide), count),
        ),
        out_shape=jax.ShapeDtypeStruct((arrays[0].shape[0], outputs), rows.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MEMORY),
    )(*visits, *arrays)
    return found[: rows.shape[0]]


@partial(jax.jit, static_argnames="cores")
def sum_of_turned(rows: Sequence[jax.Array], weights: Sequence[jax.Array], sizes: jax.Array, cores: int) -> jax.Array:
    """Return the sum over i of rows[i] . weights[i]^T, added before it is rounded: no product of its own is written."""

    def term(x, weight) -> jax.Array:
        return jax.lax.dot_general(x[...], weight[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    terms = [((x, None), (weight, 1)) for x, weight in zip(rows, weights, strict=True)]
    return visited(term, terms, sizes, cores)


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
