"""Kernels for TPU that read a matrix once and write its integers of 8 bits.

An integer is round(127 x / most), where `most` is the largest absolute value of its row or its column; a scale is
most / 127. XLA reads the values twice, for the largest ones and for the integers, and writes them in float32 before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from gregale.model.kernels.tpu.blocks import LANES

GROUP = 32  # rows in registers at a time: of a tile of 8 bits
SIZES = 2048, 1024, 512, 256, LANES  # of rows or columns that a turn of a loop takes
VALUES = 2**21  # of a block, if one row or column of tiles has fewer
# Bytes of vector memory: two blocks of float32, and two of 8 bits. With 48 MiB the compiler for v5p, which has 64,
# refuses programs whose collectives hold buffers there.
MEMORY = 41 * 2**20
SMALLEST, LARGEST = 1e-30, 127.0


def fits(rows: int, columns: int) -> bool:
    """Return whether the kernels take a matrix: whole tiles, and blocks for which vector memory has room."""
    return all(size % LANES == 0 and size * LANES <= 2 * VALUES for size in (rows, columns))


def heads_first(x: jax.Array, rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """Return x [*rows, *columns] as a matrix of the kernels, [outer rows, outer columns, rows, columns].

    Attention's arrays have an axis of heads before the positions in memory. The kernels read them so, because a matrix
    with all columns of a row together would be a copy.
    """
    too_large = prod(rows) * columns[-1] > 2 * VALUES  # for a block of one head's columns
    if len(columns) == 1 or columns[-1] not in SIZES or rows[-1] % LANES or too_large:
        return x.reshape(1, 1, prod(rows), prod(columns))
    return x.reshape(-1, rows[-1], prod(columns[:-1]), columns[-1]).swapaxes(1, 2)


# A kernel's text has its caller's line. With `jit` two calls have the same text, and the compiler joins equal ones.
@jax.jit
def by_rows(x: jax.Array, factor: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the integers [rows, columns] of a matrix times a factor [columns], and their scales [rows].

    - `x`: see `heads_first`
    """
    outer, heads, rows, width = x.shape
    columns, size = heads * width, _share(rows, heads * width)
    blocks = rows // size
    read = (None, heads, size, width), lambda i: (div(i, blocks), 0, rem(i, blocks), 0)
    block, row = ((size, columns), lambda i: (i, 0)), ((1, size), lambda i: (0, i))
    whole = (1, columns), lambda i: (0, 0)
    inputs = [(x, *read)] if factor is None else [(x, *read), (factor[None], *whole)]
    outputs = [((outer * rows, columns), jnp.int8, *block), ((1, outer * rows), jnp.float32, *row)]
    scratch = pltpu.VMEM((size, LANES), jnp.float32)
    body = _by_rows if factor is not None else lambda x, *others: _by_rows(x, None, *others)
    numbers, scale = kernel_call("quantise_rows", body, outer * blocks, inputs, outputs, [scratch])
    return numbers, scale[0]


@partial(jax.jit, static_argnums=1)
def by_columns(x: jax.Array, turned: bool) -> tuple[jax.Array, jax.Array]:
    """Return the integers of a matrix [rows, columns], or turned [columns, rows], and their scales [columns].

    - `x`: see `heads_first`
    """
    outer, heads, rows, width = x.shape
    size = width if heads > 1 else LANES if turned else _share(width, outer * rows)
    read = (outer, None, rows, size), lambda i: (0, i, 0, 0) if heads > 1 else (0, 0, 0, i)
    shape, column = (outer * rows, heads * width), ((1, size), lambda i: (0, i))
    out = (shape, jnp.int8, (shape[0], size), lambda i: (0, i))
    if turned:
        out = (shape[::-1], jnp.int8, (size, shape[0]), lambda i: (i, 0))
    outputs = [out, ((1, shape[1]), jnp.float32, *column)]
    body = partial(_by_columns, turned)
    name = "quantise_turned" if turned else "quantise_columns"
    numbers, scale = kernel_call(name, body, shape[1] // size, [(x, *read)], outputs, [])
    return numbers, scale[0]


def _by_rows(x, factors, numbers, scale, most) -> None:
    heads, rows, width = x.shape
    columns = heads * width
    size = next(size for size in SIZES if columns % size == 0)
    step = min(size, width)

    def values(group, index):
        """Yield columns of a turn, and their values."""
        for part in range(size // step):
            chunk = group_of(index * (size // step) + part, step)
            found = x[index * (size // step) + part, group] if heads > 1 else x[0, group, chunk]
            found = found.astype(jnp.float32)
            yield chunk, found if factors is None else found * factors[:, chunk]

    def run(group) -> None:
        def larger(index, found):
            for _, each in values(group, index):
                for start in range(0, step, LANES):
                    found = jnp.maximum(found, jnp.abs(each[:, start : start + LANES]))
            return found

        found = jax.lax.fori_loop(0, columns // size, larger, jnp.full((GROUP, LANES), SMALLEST))
        largest = jnp.max(found, axis=1, keepdims=True)
        most[group] = jnp.broadcast_to(largest, found.shape)
        factor = LARGEST / largest

        def write(index, _) -> None:
            for chunk, each in values(group, index):
                numbers[group, chunk] = jnp.round(each * factor).astype(jnp.int8)

        jax.lax.fori_loop(0, columns // size, write, None)

    jax.lax.fori_loop(0, rows // GROUP, lambda index, _: run(group_of(index, GROUP)), None)
    scale[...] = most[...].T[:1] / LARGEST


def _by_columns(turned: bool, x, numbers, scale) -> None:
    outer, rows, columns = x.shape
    size = next(size for size in SIZES[2:] if rows % size == 0)
    turns = rows // size

    def values(index):
        return x[div(index, turns), group_of(rem(index, turns), size)].astype(jnp.float32)

    def larger(index, found):
        return jnp.maximum(found, jnp.max(jnp.abs(values(index)).reshape(-1, 8, columns), axis=0))

    found = jax.lax.fori_loop(0, outer * turns, larger, jnp.full((8, columns), SMALLEST))
    largest = jnp.max(found, axis=0, keepdims=True)
    scale[...] = largest / LARGEST
    factor = LARGEST / largest

    def write(index, _) -> None:
        rounded, group = jnp.round(values(index) * factor), group_of(index, size)
        if turned:
            numbers[:, group] = rounded.T.astype(jnp.int8)
        else:
            numbers[group] = rounded.astype(jnp.int8)

    jax.lax.fori_loop(0, outer * turns, write, None)


def group_of(index, size: int):
    return pl.ds(pl.multiple_of(index * size, size), size)


def _share(size: int, other: int) -> int:
    """Return the rows of a block, or the columns: a multiple of a tile's that divides all."""
    found = [part for part in range(LANES, size + 1, LANES) if size % part == 0 and part * other <= VALUES]
    return max(found, default=LANES)


def kernel_call(name: str, body: Callable, steps: int, inputs, outputs, scratch):
    """Run a kernel over blocks: `inputs` are (array, block, index), `outputs` (shape, dtype, block, index)."""
    with jax.named_scope(name):
        return pl.pallas_call(
            body,
            grid=(steps,),
            in_specs=[pl.BlockSpec(*each) for _, *each in inputs],
            out_specs=[pl.BlockSpec(*each) for _, _, *each in outputs],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _, _ in outputs],
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=MEMORY),
            name=name,
        )(*(x for x, *_ in inputs))
