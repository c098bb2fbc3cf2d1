"""The layout of shards in a checkpoint: the process that writes each shard, its offset, and the rows to read back.

Each process writes one stream of shards, in row-major order and the processor's byte order, cut into parts of
`part_bytes`. Of the processes that hold a shard, the process with the shortest stream so far writes it. All processes
compute the same plan from the shardings alone.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding


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
