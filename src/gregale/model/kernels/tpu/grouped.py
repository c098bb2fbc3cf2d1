"""Products of rows with the matrices of their groups by JAX's Pallas kernels for TPUs (megablox)."""

import jax
import jax.numpy as jnp

from gregale.model.kernels.grouped import GroupedProducts

ROWS = 128  # of a block; groups need not begin at one. A larger one has more rows of other groups
LANES = 128


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # late, because Pallas takes a second to import

    inputs, outputs = (2, 1) if transposed else (1, 2)
    own = tiles(weights.shape[inputs], weights.shape[outputs])
    return gmm(filled(rows), weights, sizes, rows.dtype, own, transpose_rhs=transposed)[: rows.shape[0]]


def weight_gradients(rows: jax.Array, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    own = tiles(rows.shape[1], cotangents.shape[1])
    return tgmm(filled(rows).T, filled(cotangents), sizes, rows.dtype, own)


def filled(rows: jax.Array) -> jax.Array:
    """Fill rows up to whole blocks."""
    return jnp.pad(rows, ((0, -rows.shape[0] % ROWS), (0, 0)))


def tiles(inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return the tiles of rows, inputs and outputs: two of outputs or more, which a chip's cores (v4, v5p) share."""
    most = min(1024 if inputs <= 1024 else 512, max(LANES, outputs // 2))
    return ROWS, tile(inputs, 2048), tile(outputs, most)


def tile(size: int, most: int) -> int:
    """Return a tile's width, at most `most`: all of the size; a large divisor; else the kernels cut the last tile."""
    if size <= most:
        return size
    divisor = max((tile for tile in range(LANES, most + 1, LANES) if size % tile == 0), default=0)
    if 2 * divisor >= most:
        return divisor
    count = -(-size // most)
    return -(-size // (count * LANES)) * LANES


MEGABLOX = GroupedProducts(product, weight_gradients)
