"""Whether a state is worth keeping: every number in it is finite."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gregale.checkpoint.leaves import arrays_by_name

_NAMES_SHOWN = 3


def not_finite(tree: Any) -> list[str]:
    """The names of a tree's floating-point arrays that hold NaN or an infinity.

    It is a program of its own over all devices, replicas too, and every process gets the same answer. It waits for the
    device.
    """
    arrays = {name: array for name, array in arrays_by_name(tree).items() if jnp.issubdtype(array.dtype, jnp.inexact)}
    if not arrays:
        return []
    flags = jax.device_get(_checking(_everywhere(next(iter(arrays.values()))))(list(arrays.values())))
    return [name for name, is_finite in zip(arrays, flags, strict=True) if not is_finite]


def listed(names: list[str]) -> str:
    """Some arrays in words: the first few, and how many more."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _everywhere(array: jax.Array) -> Sharding | None:
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@cache
def _checking(everywhere: Sharding | None):
    def check(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(array).all() for array in arrays])

    return jax.jit(check, out_shardings=everywhere)
