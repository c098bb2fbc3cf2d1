"""The state of an optimizer in bfloat16, with stochastic rounding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

MOMENTS = ("float32", "bfloat16")


class RoundedState(NamedTuple):
    count: ArrayLike  # updates so far
    inner: Any  # the transformation's own state; arrays of more than one float32 as bfloat16


def kept_in(dtype: str, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation whose state is kept in `dtype` between updates, one of `MOMENTS`.

    An update computes in float32, from the state as it is kept. With bfloat16 the new state is rounded up or down by
    chance, so that its mean is exact: a moment that changes by less than half of its last bit would never change if it
    were rounded to the nearest. The chance follows from the value and the number of the update. So it is the same on
    every mesh and after a resume.
    """
    if dtype == "float32":
        return transformation

    def init(params):
        return RoundedState(jnp.zeros((), jnp.int32), _rounded(transformation.init(params), jnp.zeros((), jnp.int32)))

    def update(updates, state, params=None):
        inner = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.inner)
        updates, inner = transformation.update(updates, inner, params)
        count = optax.safe_increment(state.count)
        return updates, RoundedState(count, _rounded(inner, count))

    return optax.GradientTransformation(init, update)


def _rounded(state: Any, count: ArrayLike) -> Any:
    def one(array: jax.Array) -> jax.Array:
        is_moment = array.ndim > 0 and array.dtype == jnp.float32
        return stochastically_rounded(array, count) if is_moment else array

    return jax.tree.map(one, state)


def stochastically_rounded(values: jax.Array, count: ArrayLike) -> jax.Array:
    """Return float32 values as bfloat16: up with the probability of their lower 16 bits / 2^16, else towards zero.

    What is not finite stays so.

    - `count`: an integer []; another one draws other chances
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    chance = (bits ^ (jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    chance = (chance ^ (chance >> 13)) * jnp.uint32(0xC2B2AE35)  # the finaliser of MurmurHash3
    chance = chance ^ (chance >> 16)
    upper = (bits + (chance & 0xFFFF)) >> 16
    rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))
