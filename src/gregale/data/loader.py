"""Batches in the order of the steps, prepared in advance."""

from collections.abc import Iterator, Sequence

from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples

THREADS = 4
BATCHES_AHEAD = 8  # prepared in advance; limits the memory


class Batches(Iterator[ExampleBatch]):
    """An iterator with background threads: use it in a `with` statement, or call `close`, to stop them."""

    def __init__(self, made):
        self._made = made

    def __next__(self) -> ExampleBatch:
        """Return the arrays of the next step, [row, L]."""
        return next(self._made)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads that prepare batches."""
        self._made.close()


def batches(
    examples: Examples | ReplicaExamples, batch_size: int, rows: Sequence[int] | None = None, first: int = 0
) -> Batches:
    """Return the rows of consecutive batches that one process needs; a batch depends only on its first example.

    Args:
        examples: the source of the batches, see their `batch`; blank rows pad the last batch of a finite set.
        batch_size: B, rows of a whole batch over all processes.
        rows: the indices in 0 to B - 1 of the rows that this process needs; by default all.
        first: the first example of the first batch; a resumed run needs nothing else.
    """
    import grain

    rows = range(batch_size) if rows is None else rows

    def batch(number: int) -> ExampleBatch:
        return examples.batch(first + number * batch_size, batch_size, rows)

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
    numbers = grain.MapDataset.range(examples.batches_from(first, batch_size))
    return Batches(iter(numbers.map(batch).to_iter_dataset(reading)))
