"""Batches in the order of the steps, made ahead of time."""

from collections.abc import Iterator, Sequence

from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples

THREADS = 4
BATCHES_AHEAD = 8  # made before they are asked for; bounds the memory


class Batches(Iterator[ExampleBatch]):
    """An iterator with threads behind it: use it in a `with` statement, or call `close`, to end them."""

    def __init__(self, made):
        self._made = made

    def __next__(self) -> ExampleBatch:
        """The next step's arrays, [row, L]."""
        return next(self._made)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads that make batches."""
        self._made.close()


def batches(
    examples: Examples | ReplicaExamples, batch_size: int, rows: Sequence[int] | None = None, first: int = 0
) -> Batches:
    """The rows of batch after batch that one process needs; what a batch has depends on where it begins alone.

    Args:
        examples: what a batch has of them, see their `batch`; finite ones end with a batch padded by blank rows.
        batch_size: B, rows of a whole batch over all processes.
        rows: which rows of each batch this process needs, from 0 to B - 1; all of them if not given.
        first: the example that the first batch begins with; resuming takes nothing else.
    """
    import grain

    rows = range(batch_size) if rows is None else rows

    def batch(number: int) -> ExampleBatch:
        return examples.batch(first + number * batch_size, batch_size, rows)

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
    numbers = grain.MapDataset.range(examples.batches_from(first, batch_size))
    return Batches(iter(numbers.map(batch).to_iter_dataset(reading)))
