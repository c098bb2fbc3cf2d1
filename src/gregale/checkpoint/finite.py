"""A check that all numbers of a state are finite, before it is saved."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gregale.checkpoint.leaves import arrays_by_name


def not_finite(tree: Any) -> list[str]:
    """Return the names of a tree's floating-point arrays that contain NaN or an infinity.

    The check is a separate program over all devices, replicas included. Every process gets the same result. It waits
    for the device.
    """
    arrays = {name: array for name, array in arrays_by_name(tree).items() if jnp.issubdtype(array.dtype, jnp.inexact)}
    if not arrays:
        return []
    flags = jax.device_get(_checking(_everywhere(next(iter(arrays.values()))))(list(arrays.values())))
    return [name for name, is_finite in zip(arrays, flags, strict=True) if not is_finite]


def _everywhere(array: jax.Array) -> Sharding | None:
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@cache
def _checking(everywhere: Sharding | None):
    def check(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(array).all() for array in arrays])

    return jax.jit(check, out_shardings=everywhere)
