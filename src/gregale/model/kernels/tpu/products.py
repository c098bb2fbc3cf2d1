"""Kernels of products for TPU that write integers of 8 bits, also of silu(gate) * up. They import Pallas.

An integer is round(127 x / most), where `most` is the largest absolute value of its row or its column; a scale is
most / 127. XLA reads the values twice, for the largest ones and for the integers, and writes them in float32 before.

    s = sigmoid(gate)    p = gate s up    by_gate = g up s (1 + gate (1 - s))    by_up = g gate s

for the gradient g by p. Integers and scales are those of `int8_quantise`; values before them are float32. XLA would
write p, by_gate and by_up in the compute dtype, and read them again for each kind of scale.
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


WIDTH = 2**15  # bytes of a row at most: blocks have `LANES` whole rows
TILE = 512  # rows and columns of a block without: those that divide the matrix
CHUNK = 256  # columns in registers at a time
SUBLANES = 8


def gated_fits(rows: int, columns: int, bytes_of_a_value: int) -> bool:
    """Return whether the kernels take a matrix: whole tiles, and blocks for which vector memory has room."""
    return rows % LANES == 0 and columns % LANES == 0 and columns * bytes_of_a_value <= WIDTH


@jax.jit
def gated_rows(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the integers of p [rows, columns], and their scales [rows]."""
    rows, columns = gate.shape
    block, row = ((LANES, columns), lambda i: (i, 0)), ((1, LANES), lambda i: (0, i))
    outputs = [(gate.shape, jnp.int8, *block), ((1, rows), jnp.float32, *row)]
    scratch = [pltpu.VMEM((GROUP, columns), jnp.float32), pltpu.VMEM((LANES, LANES), jnp.float32)]
    numbers, scale = kernel_call(
        "gated_rows", _gated_rows, rows // LANES, [(gate, *block), (up, *block)], outputs, scratch
    )
    return numbers, scale[0]


@jax.jit
def gradient_rows(gate: jax.Array, up: jax.Array, by_gated: jax.Array, by_gate: jax.Array, by_up: jax.Array):
    """Return the integers of the gradients by gate and by up times factors [columns], with scales [rows].

    The fifth is the largest absolute value in each column of by_gate, by_up and p: float32 [3, columns].
    """
    rows, columns = gate.shape
    block, row = ((LANES, columns), lambda i: (i, 0)), ((1, LANES), lambda i: (0, i))
    tops = (None, 3, columns), lambda i: (i, 0, 0)
    whole = (2, columns), lambda i: (0, 0)
    inputs = [*((each, *block) for each in (gate, up, by_gated)), (jnp.stack([by_gate, by_up]), *whole)]
    numbers, scales = (gate.shape, jnp.int8, *block), ((1, rows), jnp.float32, *row)
    steps = rows // LANES
    outputs = [numbers, numbers, scales, scales, ((steps, 3, columns), jnp.float32, *tops)]
    scratch = [pltpu.VMEM((each, columns), jnp.float32) for each in (3 * SUBLANES, 2 * GROUP)]
    scratch += [*[pltpu.VMEM((LANES, LANES), jnp.float32)] * 2]
    of_gate, of_up, scale_gate, scale_up, most = kernel_call(
        "gated_gradient_rows", _gradient_rows, steps, inputs, outputs, scratch
    )
    return of_gate, of_up, scale_gate[0], scale_up[0], jnp.max(most, axis=0)


@jax.jit
def gradient_columns(gate: jax.Array, up: jax.Array, by_gated: jax.Array, most: jax.Array):
    """Return the integers of by_gate and by_up [rows, columns] and of p turned [columns, rows], with scales [columns].

    - `most`: see `gradient_rows`
    """
    rows, columns = gate.shape
    high, wide = (next(size for size in (TILE, TILE // 2, LANES) if each % size == 0) for each in (rows, columns))
    across = columns // wide
    block = (high, wide), lambda i: (div(i, across), rem(i, across))
    turned = (wide, high), lambda i: (rem(i, across), div(i, across))
    most = jnp.maximum(most, SMALLEST)
    factors = LARGEST / most, (3, wide), lambda i: (0, rem(i, across))
    inputs = [*((each, *block) for each in (gate, up, by_gated)), factors]
    numbers = (gate.shape, jnp.int8, *block)
    outputs = [numbers, numbers, (gate.shape[::-1], jnp.int8, *turned)]
    found = kernel_call("gated_gradient_columns", _gradient_columns, rows // high * across, inputs, outputs, [])
    return *found, *(most / LARGEST)


def _gated_rows(gate, up, numbers, scale, values, most) -> None:
    rows, columns = gate.shape
    width = _chunk(columns)

    def run(turn, _) -> None:
        group = group_of(turn, GROUP)

        def compute(index, found):
            chunk = group_of(index, width)
            exact = gate[group, chunk].astype(jnp.float32)
            p = exact * _sigmoid(exact) * up[group, chunk].astype(jnp.float32)
            values[:, chunk] = p
            return _larger(found, p)

        found = jax.lax.fori_loop(0, columns // width, compute, jnp.full((GROUP, LANES), SMALLEST))
        _write(group, found, values, numbers, most)

    jax.lax.fori_loop(0, rows // GROUP, run, None)
    scale[...] = most[...].T[:1] / LARGEST


def _gradient_rows(
    gate, up, by_gated, factors, of_gate, of_up, scale_gate, scale_up, tops, highest, values, most_gate, most_up
) -> None:
    rows, columns = gate.shape
    width = _chunk(columns)
    highest[...] = jnp.zeros(highest.shape, jnp.float32)

    def run(turn, _) -> None:
        group = group_of(turn, GROUP)

        def compute(index, found):
            chunk = group_of(index, width)
            exact = _gradients(gate[group, chunk], up[group, chunk], by_gated[group, chunk])
            for place, each in enumerate(exact):
                part = slice(place * SUBLANES, (place + 1) * SUBLANES)
                high = jnp.max(jnp.abs(each).reshape(-1, SUBLANES, width), axis=0)
                highest[part, chunk] = jnp.maximum(highest[part, chunk], high)
            scaled = [each * factors[place : place + 1, chunk] for place, each in enumerate(exact[:2])]
            for place, each in enumerate(scaled):
                values[place * GROUP : (place + 1) * GROUP, chunk] = each
            return tuple(_larger(one, each) for one, each in zip(found, scaled, strict=True))

        start = (jnp.full((GROUP, LANES), SMALLEST),) * 2
        found = jax.lax.fori_loop(0, columns // width, compute, start)
        _write(group, found[0], values.at[:GROUP], of_gate, most_gate)
        _write(group, found[1], values.at[GROUP:], of_up, most_up)

    jax.lax.fori_loop(0, rows // GROUP, run, None)
    for place in range(3):
        tops[place] = jnp.max(highest[place * SUBLANES : (place + 1) * SUBLANES], axis=0)
    scale_gate[...] = most_gate[...].T[:1] / LARGEST
    scale_up[...] = most_up[...].T[:1] / LARGEST


def _gradient_columns(gate, up, by_gated, factors, of_gate, of_up, of_gated) -> None:
    def run(turn, _) -> None:
        group = group_of(turn, LANES)
        exact = _gradients(gate[group], up[group], by_gated[group])
        by_gate, by_up, p = (jnp.round(each * factors[place : place + 1]) for place, each in enumerate(exact))
        of_gate[group] = by_gate.astype(jnp.int8)
        of_up[group] = by_up.astype(jnp.int8)
        of_gated[:, group] = p.T.astype(jnp.int8)

    jax.lax.fori_loop(0, gate.shape[0] // LANES, run, None)


def _gradients(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return by_gate, by_up and p."""
    gate, up, by_gated = (each.astype(jnp.float32) for each in arrays)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return by_gated * up * (sigmoid * (1 + gate - silu)), by_gated * silu, silu * up


def _sigmoid(x: jax.Array) -> jax.Array:
    """Return 1 / (1 + exp(-x)) by the unit for tanh: a division would take more instructions."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


def _larger(found: jax.Array, values: jax.Array) -> jax.Array:
    for start in range(0, values.shape[1], LANES):
        found = jnp.maximum(found, jnp.abs(values[:, start : start + LANES]))
    return found


def _write(group, found: jax.Array, values, numbers, most) -> None:
    """Write the integers of a group of rows."""
    columns = values.shape[1]
    largest = jnp.max(found, axis=1, keepdims=True)
    most[group] = jnp.broadcast_to(largest, found.shape)
    factor = LARGEST / largest
    width = next(size for size in SIZES if columns % size == 0)

    def write(index, _) -> None:
        chunk = group_of(index, width)
        numbers[group, chunk] = jnp.round(values[:, chunk] * factor).astype(jnp.int8)

    jax.lax.fori_loop(0, columns // width, write, None)


def _chunk(columns: int) -> int:
    return next(size for size in (CHUNK, LANES) if columns % size == 0)
