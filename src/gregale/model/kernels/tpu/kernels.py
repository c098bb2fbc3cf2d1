"""The operations with differentiation rules for XLA:TPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.model.kernels.operations import (
    PLAIN,
    Kernels,
    gated_with,
    geglu_gradients,
    norm_gradients,
    swiglu_gradients,
)
from gregale.model.kernels.tpu.grouped import MEGABLOX

# XLA:TPU else makes the gradients again inside of each of the four products that take them, which costs every one of
# these a third of its time, and has a pass over gate and up for one of them besides.
SWIGLU = gated_with(jax.nn.silu, swiglu_gradients, tuple)
GEGLU = gated_with(jax.nn.gelu, geglu_gradients, tuple)


def tpu_kernels(cores: int = 1) -> Kernels:
    """Return the operations for devices with this number of cores."""
    from gregale.model.kernels.tpu.grouped_products import (
        grouped_int8,  # Pallas takes long to import
        sum_of_turned,
    )

    return replace(
        PLAIN,
        rules="tpu",
        swiglu=SWIGLU,
        geglu=GEGLU,
        rms_norm=rms_norm,
        rotate=rotate,
        grouped=replace(MEGABLOX, fused=partial(sum_of_turned, cores=cores)),
        grouped_int8=grouped_int8(cores),
        hands_on_squares=True,
    )


def rms_norm(x: NamedArray, weight: NamedArray, epsilon: float, square: jax.Array | None = None) -> NamedArray:
    if square is None:
        square = jnp.mean(jnp.square(jax.lax.stop_gradient(x.array).astype(jnp.float32)), axis=-1)
    return NamedArray(_rms_norm(x.array, weight.array, square, epsilon), x.axis_names)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rms_norm(x: jax.Array, weight: jax.Array, square: jax.Array, epsilon: float) -> jax.Array:
    return (x.astype(jnp.float32) * _inverse(square, epsilon)).astype(x.dtype) * weight.astype(x.dtype)


def _inverse(square: jax.Array, epsilon: float) -> jax.Array:
    return jax.lax.rsqrt(square + epsilon)[..., None]


def _rms_norm_forward(x, weight, square, epsilon):
    return _rms_norm(x, weight, square, epsilon), (x, weight, square)


def _rms_norm_backward(epsilon: float, saved, cotangent):
    """Return the gradients of `norm_gradients`; that of the mean square is part of that by x.

    JAX would sum the weight's gradient in bfloat16.
    """
    x, weight, square = saved
    by_x, by_weight = norm_gradients(x, weight, _inverse(square, epsilon), cotangent)
    return by_x.astype(x.dtype), by_weight.astype(weight.dtype), None


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


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
    return _turned_by(x, cos, sin, np.kron([[0, 1], [-1, 0]], np.eye(x.shape[-1] // 2)))


def _turned_by(x: jax.Array, cos: jax.Array, sin: jax.Array, swap: np.ndarray) -> jax.Array:
    swapped = jnp.dot(x, jnp.asarray(swap, x.dtype), precision=jax.lax.Precision.HIGHEST)
    return (x.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(x.dtype)


def _turned_forward(x, cos, sin):
    return _turned(x, cos, sin), (cos, sin)


def _turned_backward(saved, cotangent):
    """Return the cotangent rotated back; the derivative by angles is not needed."""
    cos, sin = saved
    # The transposed swap in place of a negated sine, which would be a pass of its own in each layer.
    return _turned_by(cotangent, cos, sin, np.kron([[0, -1], [1, 0]], np.eye(cotangent.shape[-1] // 2))), None, None


_turned.defvjp(_turned_forward, _turned_backward)
