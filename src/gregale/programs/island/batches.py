"""The batches of an island: of the examples that the fleet has leased to it, in the order of its leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from haliax import NamedArray

from gregale.data.examples import Examples, Rows
from gregale.data.mixtures import ReplicaExamples
from gregale.programs.run.batches import Placement

THREADS = 4
BATCHES_AHEAD = 8  # made before they are asked for; bounds the memory


class LeasedBatches(Iterator[dict[str, NamedArray]]):
    """Batches as global arrays [batch, position], made ahead of time; use it in a `with` statement.

    - `examples`: what all islands have in common; an example is a function of its number alone
    - `placement`: of a batch on this island's mesh
    - `take`: the first example of the batch that follows the last one taken; None if none is leased at the moment
    """

    def __init__(self, examples: Examples | ReplicaExamples, placement: Placement, take: Callable[[], int | None]):
        self._examples, self._placement, self._take = examples, placement, take
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")
        self._made: deque[Future[Rows]] = deque()

    def __next__(self) -> dict[str, NamedArray]:
        """The next batch; StopIteration for now if none is leased."""
        while len(self._made) < BATCHES_AHEAD and (first := self._take()) is not None:
            self._made.append(self._threads.submit(self._batch, first))
        if not self._made:
            raise StopIteration
        rows = self._made.popleft().result()
        return {name: self._placement.placed(array) for name, array in rows.items()}

    def _batch(self, first: int) -> Rows:
        return self._examples.batch(first, self._placement.size, self._placement.rows)

    def __enter__(self) -> LeasedBatches:
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(cancel_futures=True)
