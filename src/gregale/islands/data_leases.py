"""The examples that the fleet has leased to this island, in the order in which it trains on them."""

from __future__ import annotations

from threading import Lock

from gregale.islands.protocol.ledger import Lease, Ledger


class DataLeases:
    """What this island may train on next; threads that make batches take from it, committed rounds add to it.

    - `name`, `holder`: whose lease of the ledger
    - `batch`: examples of a batch; a lease is whole batches, unless their size has changed
    - `used`: examples that the holder has trained on before
    """

    def __init__(self, name: str, holder: str, batch: int, used: int = 0):
        self.name, self.holder, self._batch = name, holder, batch
        self._lease: Lease | None = None
        self._taken, self._spans = used, []
        self._lock = Lock()

    def update(self, ledger: Ledger, holder: str) -> None:
        """Takes over what a committed round has leased to this holder."""
        with self._lock:
            self.holder = holder
            self._lease = ledger.lease(self.name, self.holder)

    def take(self) -> int | None:
        """The first example of the next batch, which is taken with it; None if none is leased."""
        with self._lock:
            return self._next()

    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        with self._lock:
            return self._lease is None or not self._lease.after(self._taken).spans

    def used_after(self, batches: int) -> int:
        """Examples of the holder that so many batches of this process have passed, in the order they were taken."""
        with self._lock:
            return self._spans[batches - 1] if batches else self._before()

    def _before(self) -> int:
        return self._spans[0] - self._batch if self._spans else self._taken

    def _next(self) -> int | None:
        while self._lease is not None and (spans := self._lease.after(self._taken).spans):
            start, stop = spans[0]
            if stop - start < self._batch:  # of another size of batches: too short for one of this
                self._taken += stop - start
                continue
            self._taken += self._batch
            self._spans.append(self._taken)
            return start
        return None
