"""What must hold after every event, whatever happens."""

from dataclasses import dataclass, field

from gregale.islands.protocol.ledger import Ledger
from gregale.islands.protocol.messages import Generation, OuterRecord


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Invariants:
    """The history of all that was ever committed by anyone."""

    committed: dict[tuple[Generation, int], str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)  # digest of the state -> that of the one before
    lines: dict[Generation, tuple[Generation | None, bool]] = field(default_factory=dict)  # parent; may others live on
    consumed: dict[int, str] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)  # examples by the name of the island, in order
    is_strict: bool = False  # with several coordinators each state has one successor
    successors: dict[tuple[Generation, int], tuple[int, str]] = field(default_factory=dict)
    views: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # stamp and number of requests, by identity
    forked: bool = False  # a generation began whose members could not know of all others
    rounds: int = 0

    def commit(self, outer: OuterRecord, parent: str) -> None:
        """A member's state is `outer` now, made from the one with digest `parent`."""
        self.publish(outer)
        if outer.digest not in self.parents:
            self.parents[outer.digest] = parent
            self.rounds += 1
            self._check_ledger(outer.ledger)

    def publish(self, outer: OuterRecord) -> None:
        """A member's state is `outer` now: nobody has another one of this generation and round."""
        state = outer.fingerprint()
        if self.committed.setdefault((outer.generation, outer.round), state) != state:
            raise BrokenError(f"two states are committed for round {outer.round} of {outer.generation}")

    def begin(self, new: Generation, elsewhere: bool) -> None:
        """A fleet begins; `elsewhere`: there is one already, which it does not see."""
        self.lines[new] = (None, elsewhere)
        self.forked |= elsewhere
        if not elsewhere:
            self.consumed.clear()
            self.taken.clear()

    def turn(self, new: Generation, old: Generation, unsure: bool) -> None:
        """A generation begins; `unsure`: members of the old one may live on elsewhere."""
        self.lines[new] = (old, unsure)
        self.forked |= unsure

    def form(self, stamp: int, requests: dict[str, int]) -> None:
        """A coordinator forms a view of these requests: views have the order that the requests of each member have."""
        for identity, number in requests.items():
            others = self.views.setdefault(identity, [])
            if any((stamp > other) != (number > before) for other, before in others):
                raise BrokenError(f"views have no order: request {number} of {identity} is in {stamp}, others {others}")
            others.append((stamp, number))

    def follow(self, old: OuterRecord, new: OuterRecord) -> None:
        """A member makes the state `new` from `old`: nobody makes another one."""
        begun, before = (new.round, new.fingerprint()), (old.generation, old.round)
        parent, unsure = self.lines.get(new.generation, (None, False))
        if not self.is_strict or unsure or old.round < 0 or old.generation not in (new.generation, parent):
            return
        if self.successors.setdefault(before, begun) != begun:
            raise BrokenError(f"two histories: {self.successors[before]} and {begun} follow from {before}")

    def install(self, old: OuterRecord, new: OuterRecord) -> None:
        """A member gives up its state `old` for `new`: the new one's history has the old one in it."""
        if old.round < 1 or self._descends(new.digest, old.digest):
            return
        apart = set(self._line(old.generation)) ^ set(self._line(new.generation))
        if not any(self.lines.get(line, (None, False))[1] for line in apart):
            raise BrokenError(f"round {old.round} of {old.generation} is lost: {new.generation} does not have it")
        if (new.round, new.generation) < (old.round, old.generation):  # the longer history wins
            raise BrokenError(
                f"round {old.round} of {old.generation} is lost for round {new.round} of {new.generation}"
            )

    def _descends(self, digest: str, ancestor: str) -> bool:
        while digest != ancestor and digest in self.parents:
            digest = self.parents[digest]
        return digest == ancestor

    def _line(self, generation: Generation) -> list[Generation]:
        line: list[Generation] = []
        at: Generation | None = generation
        while at is not None:
            line.append(at)
            at = self.lines.get(at, (None, False))[0]
        return line

    def consume(self, example: int, who: str) -> None:
        if example in self.consumed and not self.forked:
            raise BrokenError(f"example {example} is used by {self.consumed[example]} and by {who}")
        self.consumed[example] = who
        self.taken.setdefault(who.partition("/")[0], []).append(example)

    def has_made(self, contributed: float, made: float, who: str) -> None:
        if contributed > made:
            raise BrokenError(f"{who} has contributed {contributed:g} tokens of a fragment, and made {made:g}")

    def is_of_stage(self, example: int, stage: int, ledger: Ledger) -> None:
        if sum(first <= example for first in ledger.stages) != stage and not self.forked:
            raise BrokenError(f"example {example} is used in stage {stage}, and stages begin at {ledger.stages}")

    def forget(self, name: str, count: int) -> None:
        """An island begins again from a checkpoint, before which it has used `count` examples."""
        for example in self.taken.get(name, [])[count:]:
            self.consumed.pop(example, None)
        del self.taken.get(name, [])[count:]

    def _check_ledger(self, ledger: Ledger) -> None:
        spans = sorted([*ledger.free, *(span for lease in ledger.leases for span in lease.spans)])
        ends = [0] + [stop for _, stop in spans]
        starts = [start for start, _ in spans] + [ledger.next]
        if any(start < end for start, end in zip(starts, ends, strict=True)):
            raise BrokenError("a ledger has leased an example twice")
