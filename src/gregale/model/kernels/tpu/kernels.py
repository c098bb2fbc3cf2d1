"""The operations with differentiation rules for XLA:TPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.reference import PLAIN
from gregale.model.kernels.swiglu import swiglu_with

# XLA:TPU else makes the gradients again inside of each of the four products that take them, which costs every one of
# these a third of its time, and has a pass over gate and up for one of them besides.
SWIGLU = swiglu_with(tuple)


def tpu_kernels() -> Kernels:
    return replace(PLAIN, rules="tpu", swiglu=SWIGLU, rotate=rotate)


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Return `x * cos + swapped(x) * sin`, where `swapped` gives the pair (a, b) as (-b, a).

    The swap is an exact product with a matrix of zeros, ones and minus ones; the remaining operations fuse with it.
    Without it XLA:TPU cuts heads in halves, which take as much of a row of lanes as whole ones, and joins them in a
    separate pass.
    """
    whole = jnp.concatenate([angle, angle], axis=-1)
    return _turned(x, jnp.cos(whole), jnp.sin(whole))


@jax.custom_vjp
def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    swap = np.kron([[0, 1], [-1, 0]], np.eye(x.shape[-1] // 2))
    swapped = jnp.dot(x, jnp.asarray(swap, x.dtype), precision=jax.lax.Precision.HIGHEST)
    return (x.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(x.dtype)


def _turned_forward(x, cos, sin):
    return _turned(x, cos, sin), (cos, sin)


def _turned_backward(saved, cotangent):
    """Return the cotangent rotated back; the derivative by angles is not needed."""
    cos, sin = saved
    return _turned(cotangent, cos, -sin), None, None


_turned.defvjp(_turned_forward, _turned_backward)
