"""The angles of rotary embeddings, whose cosines are computed once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gregale.model.kernels import plain


def cos_sin(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each goes through a product with the identity matrix, which is exact.

    XLA:CPU fuses a cosine into whatever uses it, barriers notwithstanding, and computes it again there for every head,
    in every layer, forward and backward. A product it does not fuse, and equal products of several layers are one.
    """
    identity = jnp.eye(angle.shape[-1], dtype=angle.dtype)
    cos, sin = (jnp.dot(x, identity, precision=jax.lax.Precision.HIGHEST) for x in plain.cos_sin(angle))
    return cos, sin
