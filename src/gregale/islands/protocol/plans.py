"""What a view can mean: the plans that members follow, and who is meant."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gregale.islands.protocol.headers import Generation, Header, Peer
from gregale.islands.protocol.ledger import Ledger, Lot, Report, advance
from gregale.islands.protocol.outliers import KEPT, Size
from gregale.islands.protocol.settings import Rules


@dataclass(frozen=True, kw_only=True)
class Leasing:
    """A plan with which the ledger goes on."""

    reports: tuple[Report, ...]
    _ledgers: dict[tuple[str, Lot], Ledger] = field(default_factory=dict, compare=False, repr=False)

    def ledger_after(self, ledger: Ledger, rules: Rules) -> Ledger:
        """The ledger that this plan brings; made once for all who share it."""
        key = ledger.digest(), rules.lot
        if key not in self._ledgers:
            self._ledgers[key] = advance(ledger, self.reports, rules.lot)
        return self._ledgers[key]


@dataclass(frozen=True)
class Begin(Leasing):
    """The fleet begins from the common seed; who is there gets a first lease of the data."""

    generation: Generation
    voters: int


@dataclass(frozen=True)
class Settle:
    """The held result `key` with this digest is committed by all that hold it; the others heal."""

    key: str
    digest: str


@dataclass(frozen=True)
class Turn(Leasing):
    """A new generation of `members`, for this `reason`; with the held result `settle`, if there is one, else the same
    state.

    Then they get new leases of the data, which a fleet that all had left has handed back.
    """

    generation: Generation
    members: tuple[Peer, ...]
    settle: Settle | None
    waited: bool
    reason: str

    @cached_property
    def there(self) -> frozenset[str]:
        """The identities of the members; made once for all who share this plan."""
        return frozenset(peer.identity for peer in self.members)


@dataclass(frozen=True)
class Form(Leasing):
    """A group reduces the next round; a commit of it brings the next ledger.

    `left_out`: why messages contribute nothing, by name; `size`: the median of those that do.
    """

    key: str
    ballot: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]
    electors: tuple[str, ...]
    voters: int
    leaving: frozenset[str]
    size: Size | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def sizes_after(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        """The sizes of the last rounds, this one among them."""
        return (*sizes, self.size)[-KEPT:] if self.size else sizes

    @cached_property
    def identities(self) -> tuple[str, ...]:
        """Of the members, in rank order; made once for all who share this plan."""
        return tuple(peer.identity for peer in self.members)

    @cached_property
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


Plan = Begin | Settle | Turn | Form | Wait


Numbers = dict[str, int]  # of asks, by identity; never changed once made


class Asks(NamedTuple):
    """The newest asks of all members that one has seen: those in its newest view, and `others`, which go before them.

    `others` are the asks of who was seen before and is not in that view, or newer than there.
    """

    newest: Numbers
    others: Numbers


NO_ASKS = Asks({}, {})  # of who saw no view yet


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
    _seen: dict[int, tuple[Asks, Asks, bool]] = field(default_factory=dict, compare=False, repr=False)
    _overtaken: dict[int, tuple[Numbers, Numbers, bool]] = field(default_factory=dict, compare=False, repr=False)
    _missing: dict[int, tuple[tuple[Peer, ...], tuple[Peer, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def slowest(self) -> float:
        """The longest step that a member reports, in seconds."""
        return max(header.step_seconds for header in self.headers.values())

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """The leaders'."""
        return tuple(header.hosts[0] for header in self.headers.values() if header.hosts)

    def missing(self, group: tuple[Peer, ...]) -> tuple[Peer, ...]:
        """Who of a group is not in the view; made once for all who have the same one."""
        if id(group) not in self._missing:
            missing = tuple(peer for peer in group if peer.identity not in self.headers)
            self._missing[id(group)] = (group, missing)
        return self._missing[id(group)][1]

    @cached_property
    def _asked(self) -> Numbers:
        return {who: header.asked for who, header in self.headers.items()}

    def after(self, asks: Asks) -> tuple[Asks, bool]:
        """The newest asks of all members seen, this view's and those before (`asks`); whether one here is not new.

        What members have in common is computed once: nearly all saw the same view before, and many saw the same ones
        before that.
        """
        if id(asks) not in self._seen:
            others, repeated = self._after_view(asks.newest)
            new = self._asked
            repeated = repeated or any(number >= new.get(who, number + 1) for who, number in asks.others.items())
            others = others | {who: number for who, number in asks.others.items() if number > new.get(who, 0)}
            self._seen[id(asks)] = (asks, Asks(new, others), repeated)
        return self._seen[id(asks)][1:]

    def _after_view(self, old: Numbers) -> tuple[Numbers, bool]:
        """What of the view before this one is not in this one, or newer there; whether an ask here is not new."""
        if id(old) not in self._overtaken:
            new = self._asked
            repeated = any(number >= new.get(who, number + 1) for who, number in old.items())
            others = {who: number for who, number in old.items() if number > new.get(who, 0)}
            self._overtaken[id(old)] = (old, others, repeated)
        return self._overtaken[id(old)][1:]
