"""Which examples which island may train on: leases of intervals of one global order, changed only by committed rounds.

The stream's examples are numbered 0, 1, 2, ... without end (an epoch is a range of numbers: the data's matter). The
ledger hands out intervals of them. It is part of the agreed outer state: `advance` is a pure function of the ledger
and of the headers in the view that began the round, so all members compute the same one, and joiners and checkpoints
get it with the state. No number is ever leased twice:

- a lease is topped up when fewer than `low` of its batches are left: what was handed back goes first, then `next`;
- a clean leaver hands back what it has not used;
- the rest of a dead island's lease is never handed out again (it may be alive and cut off, and go on using it);
  once the island is back with another session, the rest is counted as `skipped`.

A lease belongs to a name and a holder (the session that got it; a fleet restored from a checkpoint goes on with the
holders in it). `used` counts all examples that a holder has used; it never goes back.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Span = tuple[int, int]


def digest_of(*parts: object) -> str:
    """A short digest of values that JSON can write."""
    return hashlib.blake2b(json.dumps(parts, separators=(",", ":")).encode(), digest_size=8).hexdigest()


class LeasePolicy(NamedTuple):
    """How much is handed out: leases of `size` batches when fewer than `low` are left."""

    size: int = 4096
    low: int = 2048


class LeaseReport(NamedTuple):
    """What a member in a view says of its data.

    - `leaving`: it hands back what it has not used
    - `batch`: examples of one of its batches; islands may have batches of different sizes
    """

    name: str
    holder: str
    used: int
    leaving: bool = False
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """What `holder` of island `name` may use: `spans`, in this order, after the `used` examples that it reported."""

    name: str
    holder: str
    used: int
    spans: tuple[Span, ...]

    def left(self) -> int:
        """Examples that were not reported as used."""
        return sum(stop - start for start, stop in self.spans)

    def after(self, used: int) -> "Lease":
        """The lease when its holder has used so many examples in all."""
        if used <= self.used:
            return self
        spans, use = [], used - self.used
        for start, stop in self.spans:
            taken = min(use, stop - start)
            use -= taken
            if start + taken < stop:
                spans.append((start + taken, stop))
        return replace(self, used=used, spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Examples from `next` on were never handed out; `free` were handed back; `skipped` are lost for their epoch."""

    next: int = 0
    free: tuple[Span, ...] = ()
    leases: tuple[Lease, ...] = ()
    skipped: int = 0

    def lease(self, name: str, holder: str) -> Lease | None:
        """The lease of an island, if it has one."""
        return next((lease for lease in self.leases if (lease.name, lease.holder) == (name, holder)), None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        leases = [[each.name, each.holder, each.used, [list(s) for s in each.spans]] for each in self.leases]
        free = [list(span) for span in self.free]
        return {"next": self.next, "free": free, "leases": leases, "skipped": self.skipped}

    def digest(self) -> str:
        """A digest of all of it."""
        return digest_of(self.to_json())

    @classmethod
    def from_json(cls, value: object) -> "Ledger":
        """The ledger of `to_json`.

        Raises:
            ValueError: it is something else.
        """
        try:
            if not isinstance(value, dict) or value.keys() != {"next", "free", "leases", "skipped"}:
                raise ValueError
            leases = [Lease(_text(n), _text(h), _count(u), _spans(s)) for n, h, u, s in value["leases"]]
            return cls(_count(value["next"]), _spans(value["free"]), tuple(leases), _count(value["skipped"]))
        except (TypeError, ValueError):
            raise ValueError("a ledger of leases is not one that Gregale writes") from None


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _spans(value: Iterable[Sequence[object]]) -> tuple[Span, ...]:
    spans = tuple((_count(start), _count(stop)) for start, stop in value)
    if any(start >= stop for start, stop in spans):
        raise ValueError
    return spans


def advance(ledger: Ledger, reports: Iterable[LeaseReport], lot: LeasePolicy) -> Ledger:
    """The ledger after a round that began with a view of these members.

    Members are served in the order of their names. Absent ones keep what they have, and nobody else gets it.
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
        if lease.left() < lot.low * report.batch:
            lease = replace(lease, spans=_joined((*lease.spans, *store.take(lot.size * report.batch))))
        leases[report.name] = lease
    free = _joined(sorted(store.free))
    return Ledger(store.next, free, tuple(leases[name] for name in sorted(leases)), skipped)


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
