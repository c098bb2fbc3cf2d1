"""The parts of a checkpoint, which hold the shards of arrays.

Each process writes one stream of shards, in row-major order and the processor's byte order, cut into parts of
`part_bytes`. Of the processes that hold a shard, the process with the shortest stream so far writes it. All processes
compute the same plan from the shardings alone.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gregale.checkpoint.manifest import FileRecords
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.storage import ObjectPath, StoragePath, digest, read_range

PART_BYTES = 48 << 20  # a part is one request, which is repeated whole after a failure
THREADS = 8  # number of parts in memory at once


def write_parts(folder: StoragePath, prefix: str, contents: Iterable[np.ndarray], part_bytes: int) -> FileRecords:
    """Write arrays of bytes in sequence to `prefix-00000`, `prefix-00001`, ...; return the parts' checksums.

    The iterator advances only as far as the parts in flight need. All writes have ended when this returns or raises.
    """
    records: FileRecords = {}
    with ThreadPoolExecutor(THREADS) as pool:
        in_flight: deque[tuple[str, Future[dict]]] = deque()
        for number, views in enumerate(cut(contents, part_bytes)):
            if len(in_flight) == THREADS:
                name, future = in_flight.popleft()
                records[name] = future.result()
            name = _part_name(prefix, number)
            in_flight.append((name, pool.submit(write_part, folder / name, views)))
        return records | {name: future.result() for name, future in in_flight}


def write_part(path: StoragePath, views: list[memoryview]) -> dict:
    """Write an object, or a file and flush it to the disk; return size and checksum for a manifest."""
    if isinstance(path, ObjectPath):
        path.write_bytes(b"".join(views))
    else:
        with path.open("wb") as file:
            file.writelines(views)
            file.flush()
            os.fsync(file.fileno())
    return {"bytes": sum(map(len, views)), "blake2b": digest(*views)}


def read_parts(buffer: np.ndarray, folder: StoragePath, prefix: str, part_bytes: int, start: int) -> None:
    """Fill an array of bytes from position `start` of the stream; raise ValueError if a part is too short."""
    done = 0
    while done < len(buffer):
        number, offset = divmod(start + done, part_bytes)
        size = min(part_bytes - offset, len(buffer) - done)
        found = read_range(folder / _part_name(prefix, number), offset, offset + size)
        if len(found) < size:
            raise ValueError(f"{_part_name(prefix, number)} is shorter than what was written")
        buffer[done : done + size] = np.frombuffer(found, np.uint8)
        done += size


def cut(contents: Iterable[np.ndarray], part_bytes: int) -> Iterator[list[memoryview]]:
    part: list[memoryview] = []
    room = part_bytes
    for content in contents:
        view = content.data
        while len(view):
            part.append(view[:room])
            view, room = view[len(part[-1]) :], room - len(part[-1])
            if not room:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def _part_name(prefix: str, number: int) -> str:
    return f"{prefix}-{number:05d}"


@dataclass(frozen=True)
class LeafSpec:
    """The shape, the dtype's name and the axis names of a leaf."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] | None  # None: an array without axis names

    def __str__(self) -> str:
        if self.axes is None:
            return f"{self.dtype} [{', '.join(map(str, self.shape))}]"
        sizes = zip(self.axes, self.shape, strict=True)
        return f"{self.dtype} [{', '.join(f'{axis}={size}' for axis, size in sizes)}]"

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def to_json(self) -> dict:
        return {"shape": self.shape, "dtype": self.dtype, "axes": self.axes}

    @staticmethod
    def from_json(entry: dict) -> "LeafSpec":
        axes = entry["axes"]
        return LeafSpec(tuple(entry["shape"]), entry["dtype"], None if axes is None else tuple(axes))


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedArray)


def _array_in(leaf: Any) -> Any:
    """Return the array or ShapeDtypeStruct in a leaf, or None if the leaf is static."""
    value = leaf.array if isinstance(leaf, NamedArray) else leaf
    return value if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "value"


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """Return the jax.Arrays (or ShapeDtypeStructs) of a tree by path (`model/blocks/0/weight`); skip static leaves."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_named)[0]
    named = [(_name(path), array) for path, leaf in paths if (array := _array_in(leaf)) is not None]
    found = dict(named)
    assert len(found) == len(named), "two leaves have the same path: a dictionary key contains a slash"
    return found


def specs_by_name(tree: Any) -> dict[str, LeafSpec]:
    """Return shape, dtype and axis names of every array of a tree."""
    specs = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_named)[0]:
        if (array := _array_in(leaf)) is not None:
            axes = tuple(axis.name for axis in leaf.axes) if isinstance(leaf, NamedArray) else None
            specs[_name(path)] = LeafSpec(tuple(array.shape), str(array.dtype), axes)
    return specs


def fill(template: Any, arrays: dict[str, jax.Array]) -> Any:
    """Return the template with its arrays replaced by the arrays of the same names; static leaves stay."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(template, is_leaf=_is_named)

    def filled(path: tuple, leaf: Any) -> Any:
        if _array_in(leaf) is None:
            return leaf
        array = arrays[_name(path)]
        return NamedArray(array, leaf.axes) if isinstance(leaf, NamedArray) else array

    return jax.tree_util.tree_unflatten(treedef, [filled(path, leaf) for path, leaf in paths])


def sharding_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Return the sharding of a template's leaf; the first local device if it has none."""
    return leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])


def check_match(saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec], path: str, partial: bool) -> None:
    """Check that the leaves of a checkpoint can fill those of a template.

    - `partial`: whether the checkpoint may contain leaves that the template lacks

    Raises `UserError` if leaves are missing, superfluous, or of another shape, axis order or dtype.
    """
    problems = []
    if missing := sorted(wanted.keys() - saved.keys()):
        problems.append(f"it lacks {listed([f'{name} ({wanted[name]})' for name in missing], separator='; ')}")
    if not partial and (extra := sorted(saved.keys() - wanted.keys())):
        problems.append(f"it also has {listed([f'{name} ({saved[name]})' for name in extra], separator='; ')}")
    both = sorted(saved.keys() & wanted.keys())
    differing = [f"{name}: {saved[name]} there, {wanted[name]} here" for name in both if saved[name] != wanted[name]]
    if differing:
        problems.append(f"these differ: {listed(differing, separator='; ')}")
    if problems:
        raise UserError(
            f"The checkpoint {path} was written by another configuration: {'. Also, '.join(problems)}. "
            "Use the configuration it was written with, or begin a new run."
        )


class Region(NamedTuple):
    """A box of an array's elements with the given start and shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Region") -> "Region | None":
        """Return the intersection of two regions; None if it is empty."""
        starts = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, starts, strict=True))
        return Region(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the index of this region in a region that encloses it."""
        offsets = (here - there for here, there in zip(self.start, outer.start, strict=True))
        return tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.shape, strict=True))


class ShardExtent(NamedTuple):
    """A shard of an array, and the position of its bytes: the stream of a process and the offset in it."""

    region: Region
    process: int
    offset: int


Plan = dict[str, list[ShardExtent]]


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the region of a device's index in JAX."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def planned(arrays: dict[str, jax.Array]) -> Plan:
    """Return the shards of all arrays; the same in every process."""
    filled: Counter[int] = Counter()
    plan: Plan = {}
    for name, array in arrays.items():
        holders: dict[Region, set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(region_of(index, array.shape), set()).add(device.process_index)
        plan[name] = []
        for region, processes in sorted(holders.items()):
            writer = min(processes, key=lambda process: (filled[process], process))
            plan[name].append(ShardExtent(region, writer, filled[writer]))
            filled[writer] += int(np.prod(region.shape)) * array.dtype.itemsize
    return plan


def stream(arrays: dict[str, jax.Array], plan: Plan, process: int) -> list[np.ndarray]:
    """Copy the shards that this process writes to host memory that nothing else refers to; return them as bytes.

    All copies from the devices start before the first wait.
    """
    found = []
    for name, extents in plan.items():
        offsets = {extent.region: extent.offset for extent in extents if extent.process == process}
        for shard in arrays[name].addressable_shards:
            offset = offsets.pop(region_of(shard.index, arrays[name].shape), None)  # None for further replicas
            if offset is not None:
                found.append((offset, shard.data))
    for _, data in found:
        data.copy_to_host_async()
    return [_bytes_of(data) for _, data in sorted(found, key=lambda each: each[0])]


def _bytes_of(data: jax.Array) -> np.ndarray:
    on_host = np.asarray(data)
    if next(iter(data.devices())).platform == "cpu":  # a view of the array itself, which may be donated
        on_host = on_host.copy()
    return np.ascontiguousarray(on_host).reshape(-1).view(np.uint8)


def to_json(plan: Plan, part_bytes: int) -> str:
    """Return the content of `shards.json`."""
    arrays = {name: [[*each.region, each.process, each.offset] for each in extents] for name, extents in plan.items()}
    return json.dumps({"part_bytes": part_bytes, "arrays": arrays})


def from_json(content: bytes) -> tuple[Plan, int]:
    """Return the plan and the size of a part."""
    found = json.loads(content)
    plan = {
        name: [ShardExtent(Region(tuple(start), tuple(shape)), *rest) for start, shape, *rest in extents]
        for name, extents in found["arrays"].items()
    }
    return plan, found["part_bytes"]


def wanted(sharding: Sharding, shape: tuple[int, ...]) -> list[Region]:
    """Return the regions of an array that this process's devices hold, each once."""
    return sorted({region_of(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()})  # type: ignore[arg-type]


class RowRange(NamedTuple):
    """Whole rows of a shard: their region, and the contiguous bytes [start, stop) of a process's stream."""

    region: Region
    process: int
    start: int
    stop: int


def rows_for(
    shard: ShardExtent, regions: Iterable[Region], item_bytes: int, max_bytes: int = 128 << 20
) -> Iterator[RowRange]:
    """Yield a shard's rows (slices of its first axis) that overlap a region, in groups of `max_bytes`, or one row."""
    overlaps = [overlap for region in regions if (overlap := shard.region.overlap(region))]
    if not overlaps:
        return
    if not shard.region.shape:
        yield RowRange(shard.region, shard.process, shard.offset, shard.offset + item_bytes)
        return
    (first, *start), (_, *shape) = shard.region
    low = min(overlap.start[0] for overlap in overlaps)
    high = max(overlap.start[0] + overlap.shape[0] for overlap in overlaps)
    row_bytes = int(np.prod(shape, dtype=np.int64)) * item_bytes
    count = max(max_bytes // row_bytes, 1)
    for row in range(low, high, count):
        end = min(row + count, high)
        bounds = (shard.offset + (each - first) * row_bytes for each in (row, end))
        yield RowRange(Region((row, *start), (end - row, *shape)), shard.process, *bounds)


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
