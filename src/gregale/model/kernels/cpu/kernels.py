"""The operations with differentiation rules for XLA:CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.model.kernels.cpu.attention import attend
from gregale.model.kernels.cpu.projection import project
from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.reference import PLAIN, turned
from gregale.model.kernels.swiglu import swiglu_with

SWIGLU = swiglu_with(jax.lax.optimization_barrier)


def cpu_kernels() -> Kernels:
    return replace(
        PLAIN,
        rules="cpu",
        attention="blocked",
        project=project,
        swiglu=SWIGLU,
        rms_norm=rms_norm,
        rotate=rotate,
        attend=attend,
    )


def rms_norm(x: NamedArray, weight: NamedArray, epsilon: float) -> NamedArray:
    return NamedArray(_rms_norm(x.array, weight.array, epsilon), x.axis_names)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return _normalised(x, weight, epsilon)[0]


def _normalised(x, weight, epsilon):
    exact = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + epsilon)
    return (exact * inverse).astype(x.dtype) * weight.astype(x.dtype), inverse


def _rms_norm_forward(x, weight, epsilon):
    output, inverse = _normalised(x, weight, epsilon)
    return output, (x, weight, inverse)


def _rms_norm_backward(epsilon: float, saved, cotangent):
    """Return inverse * (c - n * mean(c * n)) by x, cotangent * n by weight; n = x * inverse, c = cotangent * weight."""
    x, weight, inverse = saved
    x32, by_output = (each.astype(jnp.float32) for each in jax.lax.optimization_barrier((x, cotangent)))
    normal = x32 * inverse
    scaled = by_output * weight.astype(jnp.float32)
    by_x = inverse * (scaled - normal * jnp.mean(scaled * normal, axis=-1, keepdims=True))
    by_weight = jnp.sum(by_output * normal, axis=tuple(range(x.ndim - 1)))
    return jax.lax.optimization_barrier((by_x.astype(x.dtype), by_weight.astype(weight.dtype)))


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotate channel pairs; the cosines and sines pass through an exact product with the identity matrix.

    XLA:CPU fuses a cosine into its users despite barriers, and recomputes it for every head, in every layer, forward
    and backward. It does not fuse a product, and it merges equal products of several layers.
    """
    identity = jnp.eye(angle.shape[-1], dtype=angle.dtype)
    cos, sin = (jnp.dot(f(angle), identity, precision=jax.lax.Precision.HIGHEST) for f in (jnp.cos, jnp.sin))
    return turned(x, cos, sin)
