"""Provides batches as global arrays on the mesh, made of each process's rows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import Layout
from gregale.axes.parameters import position_order
from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples

if TYPE_CHECKING:
    import grain

THREADS = 4
BATCHES_AHEAD = 8  # prepared in advance; limits the memory


INTEGERS = ("tokens", "targets", "segment_ids", "positions")


def abstract_batch(axes: tuple[Axis, Axis], layout: Layout) -> dict[str, NamedArray]:
    """Return a step's batch as `jax.ShapeDtypeStruct`s [batch, position] with the shardings of `train`."""
    shape, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)
    sharding = layout.sharding(axes, layout.compute)

    def one(dtype) -> NamedArray:
        array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return NamedArray(array, names)

    return {**{name: one(jnp.int32) for name in INTEGERS}, "loss_mask": one(jnp.float32)}


class BatchSharding:
    """Selects the rows and positions of a batch for this process, and makes global arrays of them.

    Positions are in the order in which devices that share a sequence hold them (`axes.position_order`).
    """

    def __init__(self, axes: tuple[Axis, Axis], layout: Layout):
        self._axes = axes
        self._sharding = layout.sharding(axes, layout.compute)
        indices = self._sharding.addressable_devices_indices_map((axes[0].size, axes[1].size))
        here = [index for index in indices.values() if index]
        self._rows, self._columns = (
            np.concatenate([np.arange(*part) for part in sorted({index[along].indices(size)[:2] for index in here})])
            for along, size in enumerate(axis.size for axis in axes)
        )
        self._positions = position_order(axes[1].size, layout.context)[self._columns]
        self._is_split = layout.context > 1

    @property
    def size(self) -> int:
        return self._axes[0].size

    @property
    def rows(self) -> list[int]:
        """Return the rows of each batch that this process's devices hold."""
        return self._rows.tolist()

    def part(self, rows: ExampleBatch) -> ExampleBatch:
        """Return the positions for this process of arrays [row, position]."""
        return {name: array[:, self._positions] for name, array in rows.items()} if self._is_split else rows

    def placed(self, rows: ExampleBatch) -> dict[str, NamedArray]:
        """Return global arrays [batch, position] made of this process's rows and positions, see `part`."""
        shape = tuple(axis.size for axis in self._axes)

        def shard(array, index):
            rows, columns = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            row, column = np.searchsorted(self._rows, rows[0]), np.searchsorted(self._columns, columns[0])
            return array[row : row + rows[1] - rows[0], column : column + columns[1] - columns[0]]

        made = partial(jax.make_array_from_callback, shape, self._sharding)
        return {name: hax.named(made(partial(shard, array)), self._axes) for name, array in rows.items()}


class GlobalBatches(Iterator[dict[str, NamedArray]]):
    """Iterator over the batches of a run as global arrays [batch, position] under `compute`, from example `first` on.

    A process keeps only the rows and positions that its devices hold. The batch does not depend on which those are.
    """

    def __init__(self, examples: Examples | ReplicaExamples, axes: tuple[Axis, Axis], layout: Layout, first: int = 0):
        self._placement = BatchSharding(axes, layout)
        self._batches = batches(examples, axes[0].size, self._placement.rows, first, self._placement.part)

    def __next__(self) -> dict[str, NamedArray]:
        return self._placement.placed(next(self._batches))

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._batches.close()


def batches(
    examples: Examples | ReplicaExamples,
    batch_size: int,
    rows: Sequence[int] | None = None,
    first: int = 0,
    part: Callable[[ExampleBatch], ExampleBatch] = lambda rows: rows,
) -> "grain.DatasetIterator[ExampleBatch]":
    """Return an iterator over the rows of consecutive batches that one process needs, arrays [row, L].

    Blank rows pad the last batch of a finite set. Threads prepare batches until the iterator's `close` is called.

    - `examples`: the source of the batches.
    - `batch_size`: B, rows of a whole batch over all processes.
    - `rows`: the indices in 0 to B - 1 of the rows that this process needs; by default all.
    - `first`: the first example of the first batch; a resumed run needs nothing else.
    - `part`: selects what this process needs of the rows.
    """
    import grain

    rows = range(batch_size) if rows is None else rows

    def batch(number: int) -> ExampleBatch:
        return part(examples.batch(first + number * batch_size, batch_size, rows))

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
    numbers = grain.MapDataset.range(examples.batches_from(first, batch_size))
    return iter(numbers.map(batch).to_iter_dataset(reading))
