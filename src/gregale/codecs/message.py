"""Encode many arrays into one message."""

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

from gregale.codecs.codec import Codec


def encode_all(arrays: Sequence[jax.Array], codec: Codec) -> jax.Array:
    """Encode arrays [..., n_i] to uint8 [..., sum of message_bytes(n_i)], their messages one after the other.

    Every array has its own blocks. The barrier prevents the compiler from sending the arrays instead of the message.
    """
    message = jnp.concatenate([codec.encode(array) for array in arrays], axis=-1)
    return jax.lax.optimization_barrier(message)


def decode_all(message: jax.Array, sizes: Sequence[int], codec: Codec) -> list[jax.Array]:
    """Return the arrays [..., n_i] of a message, float32; `sizes` are the n_i."""
    ends = list(accumulate(codec.message_bytes(size) for size in sizes))
    parts = jnp.split(message, ends[:-1], axis=-1)
    return [codec.decode(part, size) for part, size in zip(parts, sizes, strict=True)]
