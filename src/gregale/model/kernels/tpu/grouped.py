"""Products of rows with the matrices of their groups by JAX's Pallas kernels for TPUs (megablox)."""

import jax
import jax.numpy as jnp

from gregale.model.kernels.grouped import GroupedProducts

ROWS = 128  # of a block; groups need not begin at one
LANES = 128


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # late, because Pallas takes a second to import

    inputs, outputs = (2, 1) if transposed else (1, 2)
    k, n = weights.shape[inputs], weights.shape[outputs]
    tiles = ROWS, _tile(k, 2048), _tile(n, 1024 if k <= 1024 else 512)
    found = gmm(_filled(rows), weights, sizes, rows.dtype, tiles, transpose_rhs=transposed)
    return found[: rows.shape[0]]


def weight_gradients(rows: jax.Array, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = ROWS, _tile(rows.shape[1], 1024), _tile(cotangents.shape[1], 1024)
    return tgmm(_filled(rows).T, _filled(cotangents), sizes, rows.dtype, tiles)


def _filled(rows: jax.Array) -> jax.Array:
    """Fill rows up to whole blocks."""
    return jnp.pad(rows, ((0, -rows.shape[0] % ROWS), (0, 0)))


def _tile(size: int, most: int) -> int:
    """Return the largest multiple of a row of lanes that divides a size and is at most `most`; else all of it."""
    return max((tile for tile in range(LANES, most + 1, LANES) if size % tile == 0), default=size)


MEGABLOX = GroupedProducts(product, weight_gradients)
