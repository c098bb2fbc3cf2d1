"""Where the outer side of an island is between rounds: in this host's memory, or on its devices.

    HostOuter(island)                         # in memory of this process
    HostOuter(island, HostStore(allocate))    # in memory that `allocate` gives
    HostOuter(island, DeviceStore())          # each array on a device that has its shard

`np.asarray` brings what is kept to this host, for outer steps, digests, peers and checkpoints. The processor makes the
outer step wherever its arrays are kept, so islands with different stores agree to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.communication.shards import host_device, keys_here, on_devices, shard_key
from gregale.methods.island_parts import Part, shape_of

Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]
"""allocate(name, shape, dtype): memory for an array. It is written once, here; arrays of JAX may look into it until the
last reference is gone, so free it then and never write it again. The same name comes again with each new version."""


class OnDevice:
    """An array on one device, which `np.asarray` brings to this host."""

    def __init__(self, array: jax.Array):
        self.array = array
        self.shape, self.dtype, self.nbytes = array.shape, np.dtype(array.dtype), array.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # By way of another array: JAX would keep what it has brought down for as long as this one lives.
        return np.array(jax.device_put(self.array, host_device()), dtype, copy=copy)


Kept = np.ndarray | OnDevice


class Memory(NamedTuple):
    """What a fragment takes, in bytes; beside its message, its average and buffers."""

    host: int  # between rounds
    device: int  # between rounds, of the device that has most
    host_in_round: int
    device_in_round: int


class Store(Protocol):
    """Keeps arrays; `device` is one that has the array's shard."""

    def keep(self, name: str, array: np.ndarray, device: Any) -> Kept:
        """A copy of an array."""
        ...

    def adopt(self, name: str, array: np.ndarray, device: Any) -> Kept:
        """An array that nobody writes any more."""
        ...

    def on_devices(
        self, shards: Mapping[str, Kept], path: str, shape: tuple[int, ...], place: NamedSharding
    ) -> jax.Array:
        """The array of which these are the shards of this host's devices, by key."""
        ...

    def memory(self, part: Part) -> Memory:
        """What a fragment takes."""
        ...


def store_of(memory: str, allocate: Allocate | None = None) -> Store:
    """The store of this name, `host` or `device`; `allocate`: as of `HostStore`."""
    return DeviceStore() if memory == "device" else HostStore(allocate)


class HostStore:
    """In this host's memory.

    - `allocate`: where; default: memory of this process
    """

    def __init__(self, allocate: Allocate | None = None):
        self._allocate = allocate or (lambda _, shape, dtype: np.empty(shape, dtype))

    def keep(self, name: str, array: np.ndarray, device: Any) -> np.ndarray:
        kept = self._allocate(name, array.shape, array.dtype)
        np.copyto(kept, array)
        return kept

    def adopt(self, name: str, array: np.ndarray, device: Any) -> np.ndarray:
        return array

    def on_devices(
        self, shards: Mapping[str, Any], path: str, shape: tuple[int, ...], place: NamedSharding
    ) -> jax.Array:
        return on_devices(shards, path, shape, place)

    def memory(self, part: Part) -> Memory:
        """In a round the fragment's next version beside it, and theta on its way to the devices."""
        total = sum(part.sizes().values())
        return Memory(total, 0, total, sum(_shard_bytes(part)))


class DeviceStore:
    """On the devices, each array on one."""

    def keep(self, name: str, array: np.ndarray, device: Any) -> OnDevice:
        return self.adopt(name, np.array(array), device)  # a device of the processor's may look into what it is given

    def adopt(self, name: str, array: np.ndarray, device: Any) -> OnDevice:
        return OnDevice(jax.device_put(array, device))

    def on_devices(
        self, shards: Mapping[str, Any], path: str, shape: tuple[int, ...], place: NamedSharding
    ) -> jax.Array:
        arrays = [
            jax.device_put(shards[shard_key(path, index or (), shape)].array, device)
            for device, index in place.addressable_devices_indices_map(shape).items()
        ]
        return jax.make_array_from_single_device_arrays(shape, place, arrays)

    def memory(self, part: Part) -> Memory:
        """In a round the next version beside it, both of them on the host too; and theta's shards for other devices."""
        sizes, on = part.sizes(), Counter[Any]()
        for name, size in sizes.items():
            on[part.devices[name]] += size
        most, total, copied = max(on.values(), default=0), sum(sizes.values()), 0
        for leaf, place, size in zip(part.leaves, part.places, _shard_bytes(part), strict=True):
            places = place.addressable_devices_indices_map(shape_of(leaf))
            copied += size if len(keys_here(leaf.path, shape_of(leaf), place)) < len(places) else 0
        return Memory(0, most, 2 * total, most + copied)


def _shard_bytes(part: Part) -> list[int]:
    """Of theta's shards, one of each leaf: what a device has of it."""
    arrays = jax.tree.leaves(part.tree)
    return [prod(leaf.shape) * array.dtype.itemsize for leaf, array in zip(part.leaves, arrays, strict=True)]
