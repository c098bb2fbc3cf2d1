"""Batches in the order of the steps, prepared in advance."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples

if TYPE_CHECKING:
    import grain

THREADS = 4
BATCHES_AHEAD = 8  # prepared in advance; limits the memory


def batches(
    examples: Examples | ReplicaExamples,
    batch_size: int,
    rows: Sequence[int] | None = None,
    first: int = 0,
    part: Callable[[ExampleBatch], ExampleBatch] = lambda rows: rows,
) -> "grain.DatasetIterator[ExampleBatch]":
    """Return an iterator over the rows of consecutive batches that one process needs, arrays [row, L].

    Blank rows pad the last batch of a finite set. Threads prepare batches until the iterator's `close` is called.

    Args:
        examples: the source of the batches.
        batch_size: B, rows of a whole batch over all processes.
        rows: the indices in 0 to B - 1 of the rows that this process needs; by default all.
        first: the first example of the first batch; a resumed run needs nothing else.
        part: selects what this process needs of the rows.
    """
    import grain

    rows = range(batch_size) if rows is None else rows

    def batch(number: int) -> ExampleBatch:
        return part(examples.batch(first + number * batch_size, batch_size, rows))

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
    numbers = grain.MapDataset.range(examples.batches_from(first, batch_size))
    return iter(numbers.map(batch).to_iter_dataset(reading))
