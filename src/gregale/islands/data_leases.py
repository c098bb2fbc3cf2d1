"""The examples that the ledger leases to this island, in training order."""

from collections import deque
from threading import Lock

from gregale.islands.protocol.ledger import Lease, Ledger


class DataLeases:
    """The leases of one island. Threads that build batches take examples; committed rounds add examples.

    - `name`, `holder`: the key of the lease in the ledger
    - `batch`: the number of examples in a batch; a lease is a whole number of batches unless the batch size has changed
    - `used`: the number of examples that the holder has already trained on in this stage
    - `stage`: the number of the stage of the run, from 0; leases of other stages are not used
    """

    def __init__(self, name: str, holder: str, batch: int, used: int = 0, stage: int = 0):
        self.name, self.holder, self._batch, self._stage = name, holder, batch, stage
        self._lease: Lease | None = None
        self._newest: tuple[Ledger, str] = Ledger(), holder
        self._taken = self._used = used
        self._counted, self._later = 0, deque[int]()  # the batches in `_used`; the examples used after each later one
        self._lock = Lock()

    def update(self, ledger: Ledger, holder: str) -> None:
        """Use the ledger of the newest round; in a later stage than this island's it keeps its lease until then."""
        with self._lock:
            self._newest = ledger, holder
            if len(ledger.stages) == self._stage:
                self.holder, self._lease = holder, ledger.lease(self.name, holder)

    def begin_stage(self, stage: int, batch: int) -> None:
        """Use the leases of another stage from now on, in batches of this size, and count from 0."""
        with self._lock:
            self._stage, self._batch, self._lease = stage, batch, None
            self._taken = self._used = self._counted = 0
            self._later.clear()
        self.update(*self._newest)

    def take(self) -> int | None:
        """Take the next batch and return its first example; None if no example is leased."""
        with self._lock:
            while self._lease is not None and (spans := self._lease.after(self._taken).spans):
                start, stop = spans[0]
                if stop - start < self._batch:  # left over from another batch size: too short for a batch
                    self._taken += stop - start
                    continue
                self._taken += self._batch
                self._later.append(self._taken)
                return start
            return None

    def is_empty(self) -> bool:
        """Return whether no batch can be taken."""
        with self._lock:
            return self._lease is None or not self._lease.after(self._taken).spans

    def used_after(self, batches: int) -> int:
        """Return the number of examples used by the holder after this process's first `batches` batches.

        `batches` never decreases.
        """
        with self._lock:
            while self._counted < batches:
                self._counted, self._used = self._counted + 1, self._later.popleft()
            return self._used
