"""Kernels for TPU that compute p = silu(gate) * up, or its gradients, and write integers of 8 bits.

    s = sigmoid(gate)    p = gate s up    by_gate = g up s (1 + gate (1 - s))    by_up = g gate s

for the gradient g by p. Integers and scales are those of `eight_bits`; values before them are float32. XLA would write
p, by_gate and by_up in the compute dtype, and read them again for each kind of scale.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from gregale.model.kernels.tpu.blocks import LANES
from gregale.model.kernels.tpu.eight_bits import GROUP, LARGEST, SIZES, SMALLEST, group_of, kernel_call

WIDTH = 2**15  # bytes of a row at most: blocks have `LANES` whole rows
TILE = 512  # rows and columns of a block without: those that divide the matrix
CHUNK = 256  # columns in registers at a time
SUBLANES = 8


def fits(rows: int, columns: int, bytes_of_a_value: int) -> bool:
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
