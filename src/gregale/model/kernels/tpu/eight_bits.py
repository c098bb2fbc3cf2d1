"""Kernels for TPU that read a matrix once and write its integers of 8 bits.

An integer is round(127 x / most), where `most` is the largest absolute value of its row or its column; a scale is
most / 127. XLA reads the values twice, for the largest ones and for the integers, and writes them in float32 before.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gregale.model.kernels.tpu.blocks import LANES

GROUP = 32  # rows in registers at a time: of a tile of 8 bits
SIZES = 2048, 1024, 512, 256, LANES  # of rows or columns that a turn of a loop takes
VALUES = 2**21  # of a block, if one row or column of tiles has fewer
MEMORY = 48 * 2**20  # bytes of vector memory: two blocks of float32, and two of 8 bits
SMALLEST, LARGEST = 1e-30, 127.0


def fits(rows: int, columns: int) -> bool:
    """Return whether the kernels take a matrix: whole tiles, and blocks for which vector memory has room."""
    return all(size % LANES == 0 and size * LANES <= 2 * VALUES for size in (rows, columns))


def by_rows(x: jax.Array, factor: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the integers of x [rows, columns] times a factor [columns], and their scales [rows]."""
    rows, columns = x.shape
    size = _share(rows, columns)
    block, row = ((size, columns), lambda i: (i, 0)), ((1, size), lambda i: (0, i))
    whole = (1, columns), lambda i: (0, 0)
    inputs = [(x, *block)] if factor is None else [(x, *block), (factor[None], *whole)]
    outputs = [(x.shape, jnp.int8, *block), ((1, rows), jnp.float32, *row)]
    scratch = pltpu.VMEM((size, LANES), jnp.float32)
    body = _by_rows if factor is not None else lambda x, *others: _by_rows(x, None, *others)
    numbers, scale = _call("quantise_rows", body, rows // size, inputs, outputs, [scratch])
    return numbers, scale[0]


def by_columns(x: jax.Array, turned: bool) -> tuple[jax.Array, jax.Array]:
    """Return the integers of x [rows, columns], or of x turned [columns, rows], and their scales [columns]."""
    rows, columns = x.shape
    size = LANES if turned else _share(columns, rows)
    block, column = ((rows, size), lambda i: (0, i)), ((1, size), lambda i: (0, i))
    out = (x.shape, jnp.int8, *block)
    if turned:
        out = (x.shape[::-1], jnp.int8, (size, rows), lambda i: (i, 0))
    outputs = [out, ((1, columns), jnp.float32, *column)]
    body = partial(_by_columns, turned)
    name = "quantise_turned" if turned else "quantise_columns"
    numbers, scale = _call(name, body, columns // size, [(x, *block)], outputs, [])
    return numbers, scale[0]


def _by_rows(x, factors, numbers, scale, most) -> None:
    rows, columns = x.shape
    size = next(size for size in SIZES if columns % size == 0)

    def value(group, chunk):
        found = x[group, chunk].astype(jnp.float32)
        return found if factors is None else found * factors[:, chunk]

    def run(group) -> None:
        def larger(index, found):
            large = jnp.abs(value(group, _group(index, size)))
            for start in range(0, size, LANES):
                found = jnp.maximum(found, large[:, start : start + LANES])
            return found

        found = jax.lax.fori_loop(0, columns // size, larger, jnp.full((GROUP, LANES), SMALLEST))
        largest = jnp.max(found, axis=1, keepdims=True)
        most[group] = jnp.broadcast_to(largest, found.shape)
        factor = LARGEST / largest

        def write(chunk) -> None:
            numbers[group, chunk] = jnp.round(value(group, chunk) * factor).astype(jnp.int8)

        _each(columns, size, write)

    _each(rows, GROUP, run)
    scale[...] = most[...].T[:1] / LARGEST


def _by_columns(turned: bool, x, numbers, scale) -> None:
    rows, columns = x.shape
    size = next(size for size in SIZES[2:] if rows % size == 0)

    def larger(index, found):
        values = jnp.abs(x[_group(index, size)].astype(jnp.float32))
        return jnp.maximum(found, jnp.max(values.reshape(-1, 8, columns), axis=0))

    found = jax.lax.fori_loop(0, rows // size, larger, jnp.full((8, columns), SMALLEST))
    largest = jnp.max(found, axis=0, keepdims=True)
    scale[...] = largest / LARGEST
    factor = LARGEST / largest

    def write(group) -> None:
        values = jnp.round(x[group].astype(jnp.float32) * factor)
        if turned:
            numbers[:, group] = values.T.astype(jnp.int8)
        else:
            numbers[group] = values.astype(jnp.int8)

    _each(rows, size, write)


def _group(index, size: int):
    return pl.ds(pl.multiple_of(index * size, size), size)


def _each(rows: int, size: int, run: Callable) -> None:
    """Run a function for each group of rows, or of columns."""
    jax.lax.fori_loop(0, rows // size, lambda index, _: run(_group(index, size)), None)


def _share(size: int, other: int) -> int:
    """Return the rows of a block, or the columns: a multiple of a tile's that divides all."""
    found = [part for part in range(LANES, size + 1, LANES) if size % part == 0 and part * other <= VALUES]
    return max(found, default=LANES)


def _call(name: str, body: Callable, steps: int, inputs, outputs, scratch):
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
