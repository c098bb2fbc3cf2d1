"""Shards of arrays in a host's memory, by key: from devices, to devices, and the processor that computes with them.

A shard's key is `{path of its array}|{its index along each axis}`: the same on every island with the same mesh. Two
hosts share a key only if both hold the shard.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.errors import UserError

Index = tuple[slice, ...]


def shard_key(path: str, index: Index, shape: Sequence[int]) -> str:
    places = []
    for part, size in zip(index, shape, strict=True):
        start, stop, _ = part.indices(size)
        places.append(start // max(1, stop - start))
    return f"{path}|{','.join(map(str, places))}"


def keys_here(path: str, shape: tuple[int, ...], sharding: NamedSharding) -> list[str]:
    """Return the keys of an array's shards on this host, each once."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({shard_key(path, index, shape) for index in indices if index is not None})


def shards_here(path: str, array: jax.Array) -> dict[str, jax.Array]:
    """Return an array's shards on this host by key, each once, on one of their devices."""
    return {shard_key(path, shard.index, array.shape): shard.data for shard in array.addressable_shards}


def on_host(messages: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the messages of `Island.depart` by key, uint8 [rows, bytes of a row]; wait for the devices.

    They may be views of the devices' own memory: read only, valid as long as they are referenced.
    """
    found = {}
    for path, array in messages.items():
        shape, at = array.shape[:-2], array.ndim - 2
        for shard in array.addressable_shards:
            found.setdefault(shard_key(path, shard.index[:at], shape), shard.data)
    for data in found.values():
        data.copy_to_host_async()
    return {key: np.asarray(data).reshape(data.shape[-2:]) for key, data in found.items()}


def on_devices(
    parts: Mapping[str, np.ndarray], path: str, shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """Return the array whose shards this host has for its devices, by key."""
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[shard_key(path, index or (), shape)])


def host_device() -> Any:
    """Return the processor, for computations outside of steps. Raise `UserError` if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise UserError(
            f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')!r}, so JAX may not use the processor, on which islands "
            f"make the outer step. Add it to the present value: JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')},cpu."
        ) from None
