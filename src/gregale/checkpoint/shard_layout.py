"""Arrays as rows of bytes: which process writes which piece of which array, where, and which rows come back from where.

Each process writes one stream, its pieces one after the other in row-major order and the processor's byte order, cut
into parts of `part_bytes`. A piece is what one device holds of an array; of the processes that hold it, the one with
the shortest stream so far writes it. All processes come to the same plan, from the shardings alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding


class Region(NamedTuple):
    """A box of an array's elements: from `start` on, of `shape`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Region) -> Region | None:
        """What two boxes have in common; None: nothing."""
        starts = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, starts, strict=True))
        return Region(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Where this box is in one that encloses it."""
        offsets = (here - there for here, there in zip(self.start, outer.start, strict=True))
        return tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.shape, strict=True))


class ShardExtent(NamedTuple):
    """A block of an array and where its bytes are: in the stream of a process, from `offset` on."""

    block: Region
    process: int
    offset: int


Plan = dict[str, list[ShardExtent]]


def block_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """The block of a device's index, as JAX has it."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def planned(arrays: dict[str, jax.Array]) -> Plan:
    """The pieces of all arrays; the same in every process."""
    filled: Counter[int] = Counter()
    plan: Plan = {}
    for name, array in arrays.items():
        holders: dict[Region, set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(block_of(index, array.shape), set()).add(device.process_index)
        plan[name] = []
        for block, processes in sorted(holders.items()):
            writer = min(processes, key=lambda process: (filled[process], process))
            plan[name].append(ShardExtent(block, writer, filled[writer]))
            filled[writer] += int(np.prod(block.shape)) * array.dtype.itemsize
    return plan


def stream(arrays: dict[str, jax.Array], plan: Plan, process: int) -> list[np.ndarray]:
    """The pieces that this process writes, as bytes in host memory that nothing else refers to.

    All copies from the devices are under way before the first is waited for.
    """
    shards = []
    for name, pieces in plan.items():
        offsets = {piece.block: piece.offset for piece in pieces if piece.process == process}
        for shard in arrays[name].addressable_shards:
            offset = offsets.pop(block_of(shard.index, arrays[name].shape), None)  # one of its replicas is enough
            if offset is not None:
                shards.append((offset, shard.data))
    for _, data in shards:
        data.copy_to_host_async()
    return [_bytes_of(data) for _, data in sorted(shards, key=lambda each: each[0])]


def _bytes_of(data: jax.Array) -> np.ndarray:
    on_host = np.asarray(data)
    if next(iter(data.devices())).platform == "cpu":  # a view of the array itself, which may be donated
        on_host = on_host.copy()
    return np.ascontiguousarray(on_host).reshape(-1).view(np.uint8)


def to_json(plan: Plan, part_bytes: int) -> str:
    """The content of `pieces.json`."""
    arrays = {name: [[*piece.block, piece.process, piece.offset] for piece in pieces] for name, pieces in plan.items()}
    return json.dumps({"part_bytes": part_bytes, "arrays": arrays})


def from_json(content: bytes) -> tuple[Plan, int]:
    """The plan, and the size of a part."""
    found = json.loads(content)
    plan = {
        name: [ShardExtent(Region(tuple(start), tuple(shape)), *rest) for start, shape, *rest in pieces]
        for name, pieces in found["arrays"].items()
    }
    return plan, found["part_bytes"]


def wanted(sharding: Sharding, shape: tuple[int, ...]) -> list[Region]:
    """The blocks of an array that this process's devices hold, each once."""
    return sorted({block_of(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()})  # type: ignore[arg-type]


class RowRange(NamedTuple):
    """Whole rows of a piece, which lie together in its stream: bytes [start, stop), and the block that they are."""

    block: Region
    process: int
    start: int
    stop: int


def rows_for(
    piece: ShardExtent, blocks: Iterable[Region], item_bytes: int, most_bytes: int = 128 << 20
) -> Iterator[RowRange]:
    """The rows of a piece (slices of its first axis) that any of some blocks has elements of.

    They come in groups of at most `most_bytes`, or of one row.
    """
    overlaps = [overlap for block in blocks if (overlap := piece.block.overlap(block))]
    if not overlaps:
        return
    if not piece.block.shape:
        yield RowRange(piece.block, piece.process, piece.offset, piece.offset + item_bytes)
        return
    (first, *start), (_, *shape) = piece.block
    low = min(overlap.start[0] for overlap in overlaps)
    high = max(overlap.start[0] + overlap.shape[0] for overlap in overlaps)
    row_bytes = int(np.prod(shape, dtype=np.int64)) * item_bytes
    count = max(most_bytes // row_bytes, 1)
    for row in range(low, high, count):
        end = min(row + count, high)
        bounds = (piece.offset + (each - first) * row_bytes for each in (row, end))
        yield RowRange(Region((row, *start), (end - row, *shape)), piece.process, *bounds)
