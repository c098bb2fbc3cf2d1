"""Rotary embeddings as one product with each of x and x with its halves changed over."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    both = (*cos.shape[:-1], 2, cos.shape[-1])
    cos = jnp.broadcast_to(cos[..., None, :], both)
    sin = jnp.stack([-sin, sin], axis=-2)
    turned = halves * cos + jax.lax.rev(halves, (halves.ndim - 2,)) * sin
    return turned.reshape(x.shape).astype(x.dtype)


def _turn_forward(x, cos, sin):
    return turn(x, cos, sin), (cos, sin)


def _turn_backward(saved, cotangent):
    """Turned back; angles are not differentiated."""
    cos, sin = saved
    return turn(cotangent, cos, -sin), None, None


turn.defvjp(_turn_forward, _turn_backward)
