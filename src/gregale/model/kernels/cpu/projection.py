"""Products with weights; their backward pass transposes the narrower operand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
from haliax import NamedArray
from haliax.nn import Linear


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
