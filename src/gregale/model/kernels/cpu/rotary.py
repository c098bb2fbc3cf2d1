"""Rotary embeddings, whose cosines are computed once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gregale.model.kernels import reference


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """The cosines and sines go through a product with the identity matrix, which is exact.

    XLA:CPU fuses a cosine into whatever uses it, barriers notwithstanding, and computes it again there for every head,
    in every layer, forward and backward. A product it does not fuse, and equal products of several layers are one.
    """
    identity = jnp.eye(angle.shape[-1], dtype=angle.dtype)
    cos, sin = (jnp.dot(f(angle), identity, precision=jax.lax.Precision.HIGHEST) for f in (jnp.cos, jnp.sin))
    return reference.turned(x, cos, sin)
