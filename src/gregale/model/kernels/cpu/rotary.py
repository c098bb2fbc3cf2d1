"""Rotary embeddings, whose cosines are computed once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gregale.model.kernels import reference


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotate channel pairs; the cosines and sines pass through an exact product with the identity matrix.

    XLA:CPU fuses a cosine into its users despite barriers, and recomputes it for every head, in every layer, forward
    and backward. It does not fuse a product, and it merges equal products of several layers.
    """
    identity = jnp.eye(angle.shape[-1], dtype=angle.dtype)
    cos, sin = (jnp.dot(f(angle), identity, precision=jax.lax.Precision.HIGHEST) for f in (jnp.cos, jnp.sin))
    return reference.turned(x, cos, sin)
