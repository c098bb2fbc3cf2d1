"""What a view can mean: the plans that members follow, and who is meant."""

from dataclasses import dataclass, field

from gregale.islands.protocol.headers import Generation, Header, Peer
from gregale.islands.protocol.ledger import LeaseReport
from gregale.islands.protocol.outliers import KEPT, Size


@dataclass(frozen=True)
class StartFleet:
    """The fleet begins from the common seed; who is there gets a first lease of the data, by `reports`."""

    generation: Generation
    voters: int
    reports: tuple[LeaseReport, ...]


@dataclass(frozen=True)
class CommitAccepted:
    """The held result `key` with this digest is committed by all that hold it; the others heal."""

    key: str
    digest: str


@dataclass(frozen=True)
class NewGeneration:
    """A new generation of `members`, for this `reason`; with the held result `settle`, if there is one, else the same
    state.

    Then they get new leases of the data, by `reports`, which a fleet that all had left has handed back.
    """

    generation: Generation
    members: tuple[Peer, ...]
    settle: CommitAccepted | None
    waited: bool
    reason: str
    reports: tuple[LeaseReport, ...]

    @property
    def there(self) -> frozenset[str]:
        """The identities of the members."""
        return frozenset(peer.identity for peer in self.members)


@dataclass(frozen=True)
class FormGroup:
    """A group reduces the next round; a commit of it brings the next ledger, by `reports`.

    `left_out`: why messages contribute nothing, by name; `size`: the median of those that do.
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
    left_out: dict[str, str] = field(default_factory=dict)

    def sizes_after(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        """The sizes of the last rounds, this one among them."""
        return (*sizes, self.size)[-KEPT:] if self.size else sizes

    @property
    def identities(self) -> tuple[str, ...]:
        """Of the members, in rank order."""
        return tuple(peer.identity for peer in self.members)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each member, by identity."""
        return {who: rank for rank, who in enumerate(self.identities)}


@dataclass(frozen=True)
class Wait:
    """Nothing to do; why:

    - `lacking`: voters are not here, perhaps only late
    - `missing`: so many are not here that the others cannot go on
    - `idle`: nobody wants a round
    - `who`: names of those that are waited for, as far as the view tells
    """

    reason: str
    who: tuple[str, ...] = ()
    lacking: bool = False
    missing: bool = False
    idle: bool = False


Plan = StartFleet | CommitAccepted | NewGeneration | FormGroup | Wait


@dataclass(frozen=True)
class Decision:
    """What a view means.

    plan      for the members in `current` (identities)
    top       the header that is right about the newest state; None: nobody has one
    sources   who has that state
    refused   name/session -> why
    differ    identities that have another state for the same round
    headers   of the view, by identity
    """

    plan: Plan
    top: Header | None
    current: frozenset[str]
    sources: tuple[Peer, ...]
    refused: dict[str, str]
    differ: frozenset[str] = frozenset()
    headers: dict[str, Header] = field(default_factory=dict)

    @property
    def slowest(self) -> float:
        """The longest step that a member reports, in seconds."""
        return max(header.step_seconds for header in self.headers.values())

    @property
    def addresses(self) -> tuple[str, ...]:
        """The leaders'."""
        return tuple(header.hosts[0] for header in self.headers.values() if header.hosts)

    def missing(self, group: tuple[Peer, ...]) -> tuple[Peer, ...]:
        """Who of a group is not in the view."""
        return tuple(peer for peer in group if peer.identity not in self.headers)
