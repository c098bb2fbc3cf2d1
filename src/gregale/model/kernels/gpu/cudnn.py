"""Causal attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.kernels import ATTENTION_NAME

HEAD_SIZE_MULTIPLE = 8
LARGEST_HEAD_SIZE = 128
LARGEST_HEAD_SIZE_FROM_HOPPER = 256
HOPPER = 9  # of a GPU's compute capability, the number before the point


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: int | None) -> jax.Array:
    """Segments become a bias [batch, 1, position, position], which has to have an even length; it holds the window too.

    Without segments nothing is of that size, and the kernel skips what the window hides.
    """
    length = q.shape[1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (q, k, v))
    mask, local = None, None if window is None else (window - 1, 0)
    if segments is not None:
        ids = jnp.pad(segments, ((0, 0), (0, length % 2)))
        mask, local = seen(ids, window), None
    attended = jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="cudnn"
    )
    return checkpoint_name(attended[:, :length], ATTENTION_NAME)


def seen(segments: jax.Array, window: int | None) -> jax.Array:
    """Which keys are of a token's segment and not before its window: [batch, 1, position, position]."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    if window is None:
        return same
    places = jnp.arange(segments.shape[1])
    return same & (places[:, None] - places[None, :] < window)


def largest_head_size(compute_capability: str) -> int | None:
    """Of a GPU by its compute capability, such as `8.0`; None: it is not NVIDIA's (`gfx942`)."""
    generation = compute_capability.partition(".")[0]
    if not generation.isdecimal():
        return None
    return LARGEST_HEAD_SIZE_FROM_HOPPER if int(generation) >= HOPPER else LARGEST_HEAD_SIZE
