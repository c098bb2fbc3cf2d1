"""The largest logits of attention, which kernels never hold in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

QUERIES = 256  # whose logits are in memory at a time


def largest_logits(
    q: jax.Array, k: jax.Array, segments: jax.Array | None, window: int | None, order: np.ndarray
) -> jax.Array:
    """Return the largest q . k / sqrt(head size) of the pairs of tokens that attend: float32 [batch, kv_heads].

    Arguments: as for `Attend`, and `order`, the position of each index (`axes.position_order`). Nothing is sent between
    devices that split the batch or the heads.
    """
    length, kv_heads, width = k.shape[1:]
    block = min(QUERIES, length)
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, width)
    places = jnp.asarray(order)

    def of_block(largest: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        queries = jax.lax.dynamic_slice_in_dim(grouped, start, block, axis=1)
        logits = jnp.einsum("bqkgd,bskd->bkgqs", queries, k, preferred_element_type=jnp.float32) / width**0.5
        distance = jax.lax.dynamic_slice_in_dim(places, start, block)[:, None] - places
        attends = (distance >= 0) & (True if window is None else distance < window)
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, block, axis=1)
            attends = (own[:, :, None] == segments[:, None, :])[:, None, None] & attends
        return jnp.maximum(largest, jnp.max(jnp.where(attends, logits, -jnp.inf), axis=(2, 3, 4))), None

    none = jnp.full((k.shape[0], kv_heads), -jnp.inf, jnp.float32)
    # The last block begins early enough to be whole: it repeats queries, which does not change the largest.
    starts = jnp.minimum(jnp.arange(0, length, block), length - block)
    return jax.lax.scan(of_block, none, starts)[0]
