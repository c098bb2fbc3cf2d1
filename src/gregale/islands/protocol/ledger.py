"""The data ledger: leases of intervals of one global order of examples, changed only by committed rounds.

The stream's examples are numbered 0, 1, 2, ... without end (an epoch is a range of numbers, defined by the data). The
ledger leases intervals of them. It is part of the agreed outer state: `advance` is a pure function of the ledger and of
the headers in the view that began the round. So all members compute the same ledger, and joiners and checkpoints
receive it with the state. No number is ever leased twice:

- a lease is refilled when fewer than `low` of its batches are left: first with returned examples, then from `next`;
- a clean leaver returns its unused examples;
- the rest of a dead island's lease is never leased again, because the island may be alive, cut off and still using it;
  once the island is back with another session, the rest is counted as `skipped`.

A stage of a run begins with new leases from `next` on, because examples before that are of another mixture or length.
The rest of older leases, and returned examples, are skipped.

A lease belongs to a name and a holder: the session that got it. A fleet restored from a checkpoint continues with the
saved holders. `used` counts all examples that a holder has used in this stage; it never decreases.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

Span = tuple[int, int]


def digest_of(*parts: object) -> str:
    """Return a short digest of JSON values."""
    return hashlib.blake2b(json.dumps(parts, separators=(",", ":")).encode(), digest_size=8).hexdigest()


class LeasePolicy(NamedTuple):
    """The size of leases: `size` batches when fewer than `low` are left."""

    size: int = 4096
    low: int = 2048


class LeaseReport(NamedTuple):
    """A member's report about its data."""

    name: str
    holder: str
    used: int
    leaving: bool = False  # it returns its unused examples
    batch: int = 1  # examples of one of its batches; batch sizes of islands may differ


class Lease(NamedTuple):
    """The examples of `holder` of island `name`: `spans`, in this order, after the `used` examples that it reported."""

    name: str
    holder: str
    used: int
    spans: tuple[Span, ...]

    def left(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def after(self, used: int) -> "Lease":
        if used <= self.used:
            return self
        spans, use = [], used - self.used
        for start, stop in self.spans:
            taken = min(use, stop - start)
            use -= taken
            if start + taken < stop:
                spans.append((start + taken, stop))
        return self._replace(used=used, spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Examples from `next` on were never leased; `free` were returned; `skipped` are lost for their epoch.

    `stages` are the first examples of the stages that have begun after the first.
    """

    next: int = 0
    free: tuple[Span, ...] = ()
    leases: tuple[Lease, ...] = ()
    skipped: int = 0
    stages: tuple[int, ...] = ()

    def lease(self, name: str, holder: str) -> Lease | None:
        return next((lease for lease in self.leases if (lease.name, lease.holder) == (name, holder)), None)

    def digest(self) -> str:
        return digest_of(asdict(self))

    def next_stage(self) -> "Ledger":
        """Return the ledger at the beginning of a stage, without leases."""
        left = sum(lease.left() for lease in self.leases) + sum(stop - start for start, stop in self.free)
        return Ledger(self.next, skipped=self.skipped + left, stages=(*self.stages, self.next))


def advance(ledger: Ledger, reports: Iterable[LeaseReport], lease_policy: LeasePolicy) -> Ledger:
    """Return the ledger after a round that began with a view of these members.

    Members are served in the order of their names. Absent ones keep their leases, and no other island receives those.
    """
    leases = {lease.name: lease for lease in ledger.leases}
    store = _Store(list(ledger.free), ledger.next)
    skipped = ledger.skipped
    for report in sorted(reports):
        lease = leases.pop(report.name, None)
        if lease is not None and lease.holder != report.holder:
            skipped += lease.left()
            lease = None
        lease = (lease or Lease(report.name, report.holder, report.used, ())).after(report.used)
        if report.leaving:
            store.free.extend(lease.spans)
            continue
        if lease.left() < lease_policy.low * report.batch:
            lease = lease._replace(spans=_joined((*lease.spans, *store.take(lease_policy.size * report.batch))))
        leases[report.name] = lease
    free = _joined(sorted(store.free))
    return Ledger(store.next, free, tuple(leases[name] for name in sorted(leases)), skipped, ledger.stages)


@dataclass
class _Store:
    free: list[Span]
    next: int

    def take(self, size: int) -> list[Span]:
        taken = []
        while size:
            if self.free:
                start, stop = self.free.pop(0)
                if stop - start > size:
                    self.free.insert(0, (start + size, stop))
                    stop = start + size
            else:
                start, stop = self.next, self.next + size
                self.next = stop
            taken.append((start, stop))
            size -= stop - start
        return taken


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
