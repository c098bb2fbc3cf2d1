"""The plans that follow from a view, and the members they concern."""

from dataclasses import dataclass, field

from gregale.islands.protocol.headers import AcceptedResult, Generation, Header, OuterRecord, Peer
from gregale.islands.protocol.ledger import LeaseReport, Ledger, advance
from gregale.islands.protocol.outliers import KEPT, Size
from gregale.islands.protocol.settings import Rules


@dataclass(frozen=True)
class StartFleet:
    """The fleet begins from the common seed; its members get first leases of the data, by `reports`."""

    generation: Generation
    voters: int
    reports: tuple[LeaseReport, ...]


@dataclass(frozen=True)
class CommitAccepted:
    """All members that hold the result `key` with this digest commit it; the others heal."""

    key: str
    digest: str


@dataclass(frozen=True)
class NewGeneration:
    """`members` begin a new generation, for this `reason`, with the held result `commit` or the same state.

    Then they get new leases of the data, by `reports`; a fleet whose members had all left has returned its data.
    """

    generation: Generation
    members: tuple[Peer, ...]
    commit: CommitAccepted | None
    waited: bool
    reason: str
    reports: tuple[LeaseReport, ...]

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(peer.identity for peer in self.members)


@dataclass(frozen=True)
class Adopt:
    """All voters hold `result`, with or without its data. `renewal`: it is this new generation of the same state."""

    result: AcceptedResult
    renewal: NewGeneration | None = None


@dataclass(frozen=True)
class FormGroup:
    """A group reduces the next round; its commit brings the next ledger, by `reports`.

    `left_out`: why messages contribute nothing, by name; `size`: the median of the other messages; `parts`: as of
    `messages.Reduce`.
    """

    key: str
    ballot: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]
    electors: tuple[str, ...]
    voters: int
    leaving: frozenset[str]
    reports: tuple[LeaseReport, ...]
    size: Size | None = None
    stamp: int = 0  # of the view
    left_out: dict[str, str] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    def ledger_after(self, outer: OuterRecord, rules: Rules) -> Ledger:
        """Return the ledger after this round; it may be the first of a stage, of which no example is used yet."""
        ledger, reports = outer.ledger, self.reports
        if rules.stage_at(outer.round + 1) != rules.stage_at(outer.round):
            ledger, reports = ledger.next_stage(), tuple(report._replace(used=0) for report in reports)
        return advance(ledger, reports, rules.lease_policy)

    def sizes_after(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        """Return the sizes of the last rounds, including this one."""
        return (*sizes, self.size)[-KEPT:] if self.size else sizes

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities of the members, in rank order."""
        return tuple(peer.identity for peer in self.members)

    @property
    def ranks(self) -> dict[str, int]:
        return {identity: rank for rank, identity in enumerate(self.identities)}


@dataclass(frozen=True)
class Wait:
    """Do nothing, for this `reason`."""

    reason: str
    names: tuple[str, ...] = ()  # the names of the missing islands, as far as the view has them
    lacking: bool = False  # voters are missing, perhaps only late
    missing: bool = False  # too many voters are missing to continue
    idle: bool = False  # no island wants a round


Plan = StartFleet | CommitAccepted | NewGeneration | Adopt | FormGroup | Wait


@dataclass(frozen=True)
class Decision:
    """The decision that follows from a view."""

    plan: Plan  # for the members in `current`
    top: Header | None  # a header with the newest state; None: no member has a state
    current: frozenset[str]  # identities
    sources: tuple[Peer, ...]  # the members that have that state
    refused: dict[str, str]  # reasons by identity
    differ: frozenset[str] = frozenset()  # identities that have another state for the same round
    electors: tuple[str, ...] = ()  # `Header.electors` of that state
    headers: dict[str, Header] = field(default_factory=dict)  # of the view, by identity

    @property
    def fastest(self) -> float:
        """The shortest step that a member reports, in seconds; 0 if none does."""
        return min((each.step_seconds for each in self.headers.values() if each.step_seconds), default=0.0)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(header.hosts[0] for header in self.headers.values() if header.hosts)

    def missing(self, group: tuple[Peer, ...]) -> tuple[Peer, ...]:
        """Return the members of a group that are not in the view."""
        return tuple(peer for peer in group if peer.identity not in self.headers)
