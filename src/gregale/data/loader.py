"""Batches in the order of the steps, made ahead of time."""

from collections.abc import Iterator, Sequence

from gregale.data.examples import Examples, Rows

THREADS = 4


class Batches(Iterator[Rows]):
    """The rows of step after step that one process needs; what it gives depends on the step alone.

    Use it in a `with` statement, or call `close`, to end its threads.

    Args:
        examples: row r of step t is example t * batch_size + r; finite ones end with a batch padded by blank rows.
        batch_size: B, rows of a whole batch over all processes.
        rows: which rows of each batch this process needs, from 0 to B - 1.
        start_step: the first step; resuming takes nothing else.
        ahead: batches made before they are asked for; the memory bound.
    """

    def __init__(
        self, examples: Examples, batch_size: int, rows: Sequence[int], start_step: int = 0, ahead: int = 2 * THREADS
    ):
        import grain

        steps = len(examples) if examples.endless else -(-len(examples) // batch_size)

        def batch(step: int) -> Rows:
            return examples.rows([step * batch_size + row for row in rows])

        reading = grain.ReadOptions(num_threads=min(THREADS, ahead), prefetch_buffer_size=ahead)
        self._batches = iter(grain.MapDataset.range(start_step, steps).map(batch).to_iter_dataset(reading))

    def __next__(self) -> Rows:
        """The next step's arrays, [len(rows), L]."""
        return next(self._batches)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads that make batches."""
        self._batches.close()


def batches(examples: Examples, batch_size: int, rows: Sequence[int] | None = None, start_step: int = 0) -> Batches:
    """The batches from `start_step` on, prefetched; see `Batches`. Without `rows`, all rows."""
    return Batches(examples, batch_size, range(batch_size) if rows is None else rows, start_step)
