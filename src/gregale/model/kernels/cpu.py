"""The operations with differentiation rules for XLA:CPU."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn import Linear

from gregale.model.kernels.blocked import attend, attend_with_largest
from gregale.model.kernels.operations import (
    PLAIN,
    Kernels,
    gated_with,
    geglu_gradients,
    norm_gradients,
    swiglu_gradients,
    turned,
)

SWIGLU = gated_with(jax.nn.silu, swiglu_gradients, jax.lax.optimization_barrier)
GEGLU = gated_with(jax.nn.gelu, geglu_gradients, jax.lax.optimization_barrier)


def cpu_kernels() -> Kernels:
    return replace(
        PLAIN,
        rules="cpu",
        attention="blocked",
        project=project,
        swiglu=SWIGLU,
        geglu=GEGLU,
        rms_norm=rms_norm,
        rotate=rotate,
        attend=attend,
        attend_with_largest=attend_with_largest,
    )


def rms_norm(x: NamedArray, weight: NamedArray, epsilon: float, square: jax.Array | None = None) -> NamedArray:
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
    x, weight, inverse = saved
    x, cotangent = jax.lax.optimization_barrier((x, cotangent))
    by_x, by_weight = norm_gradients(x, weight, inverse, cotangent)
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


def project(layer: Linear, x: NamedArray) -> NamedArray:
    weight = layer.weight
    In = tuple(axis for axis in weight.axes if axis in x.axes)
    Out = tuple(axis for axis in weight.axes if axis not in In)
    x = x.rearrange((..., *In))
    found: Any = _product(x.array, weight.rearrange((*In, *Out)).array, len(In))
    product = NamedArray(found, tuple(axis.name for axis in (*x.axes[: -len(In)], *Out)))
    return product if layer.bias is None else product + layer.bias


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Return x . weight: [*rows, *in], [*in, *out] -> [*rows, *out]; `contracted`: the number of axes `in`."""
    return jax.lax.dot_general(x, weight, ((_last(x, contracted), _first(contracted)), ((), ())))


def _product_forward(x, weight, contracted):
    return _product(x, weight, contracted), (x, weight)


def _product_backward(contracted: int, saved, cotangent):
    x, weight = saved
    rows, out = x.ndim - contracted, weight.ndim - contracted
    by_x = jax.lax.dot_general(cotangent, weight, ((_last(cotangent, out), _last(weight, out)), ((), ())))
    # The left operand is transposed to contract the rows.
    if x.size <= cotangent.size:
        return by_x, _over_rows(x, cotangent, rows)
    by_weight = _over_rows(cotangent, x, rows)  # [*out, *in]
    return by_x, by_weight.transpose(*range(out, weight.ndim), *range(out))


def _over_rows(left: jax.Array, right: jax.Array, rows: int) -> jax.Array:
    """Return the product summed over the first `rows` axes of both.

    The operands are matrices, which Eigen transposes while it packs them. With more axes XLA:CPU transposes the left
    one in memory, element by element, and recomputes it.
    """
    features = (*left.shape[rows:], *right.shape[rows:])
    left, right = (x.reshape(math.prod(x.shape[:rows]), -1) for x in (left, right))
    return jax.lax.dot_general(left, right, ((_first(1), _first(1)), ((), ()))).reshape(features)


def _first(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _last(x: jax.Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


_product.defvjp(_product_forward, _product_backward)
