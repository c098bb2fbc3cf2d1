"""What a view can mean: the plans that members follow, and who is meant."""

from dataclasses import dataclass, field
from functools import cached_property

from gregale.islands.protocol.headers import Generation, Header, Peer
from gregale.islands.protocol.ledger import Ledger, Lot, Report, advance
from gregale.islands.protocol.settings import Rules

Numbers = dict[str, int]
NO_NUMBERS: Numbers = {}  # of who saw no view yet; never changed


@dataclass(frozen=True)
class Begin:
    """The fleet begins from the common seed; who is there gets a first lease of the data."""

    generation: Generation
    voters: int
    reports: tuple[Report, ...]
    _ledgers: dict[Lot, Ledger] = field(default_factory=dict, compare=False, repr=False)

    def ledger(self, rules: Rules) -> Ledger:
        """The ledger that the fleet begins with; made once for all who share this plan."""
        if rules.lot not in self._ledgers:
            self._ledgers[rules.lot] = advance(Ledger(), self.reports, rules.lot)
        return self._ledgers[rules.lot]


@dataclass(frozen=True)
class Settle:
    """The held result `key` with this digest is committed by all that hold it; the others heal."""

    key: str
    digest: str


@dataclass(frozen=True)
class Turn:
    """A new generation of those in `there`; with the held result `settle`, if there is one, else the same state.

    Then those who are there get new leases of the data, which a fleet that all had left has handed back.
    """

    generation: Generation
    there: frozenset[str]
    settle: Settle | None
    waited: bool
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Form:
    """A group reduces the next round."""

    key: str
    ballot: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]
    electors: tuple[str, ...]
    voters: int
    reports: tuple[Report, ...]
    leaving: frozenset[str]
    _ledgers: dict[str, Ledger] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def identities(self) -> tuple[str, ...]:
        """Of the members, in rank order; made once for all who share this plan."""
        return tuple(peer.identity for peer in self.members)

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each member, by identity."""
        return {who: rank for rank, who in enumerate(self.identities)}

    def ledger_after(self, ledger: Ledger, rules: Rules) -> Ledger:
        """The ledger that a commit of this reduce brings."""
        if ledger.digest() not in self._ledgers:
            self._ledgers[ledger.digest()] = advance(ledger, self.reports, rules.lot)
        return self._ledgers[ledger.digest()]


@dataclass(frozen=True)
class Wait:
    """Nothing to do; why:

    - `lacking`: voters are not here, perhaps only late
    - `missing`: so many are not here that the others cannot go on
    - `idle`: nobody wants a round
    """

    reason: str
    lacking: bool = False
    missing: bool = False
    idle: bool = False


Plan = Begin | Settle | Turn | Form | Wait


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
    _after: dict[int, tuple[Numbers, Numbers, bool]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def slowest(self) -> float:
        """The longest step that a member reports, in seconds."""
        return max(header.step_seconds for header in self.headers.values())

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """The leaders'."""
        return tuple(header.hosts[0] for header in self.headers.values() if header.hosts)

    def after(self, numbers: Numbers) -> tuple[Numbers, bool]:
        """The newest asks of all members seen, this view's and those before (`numbers`); whether one here is not new.

        Members that saw the same views have the same `numbers`: computed once for them.
        """
        if id(numbers) not in self._after:
            asked = {who: header.asked for who, header in self.headers.items()}
            repeated = any(numbers.get(who, 0) >= number for who, number in asked.items())
            newest = numbers | {who: max(number, numbers.get(who, 0)) for who, number in asked.items()}
            self._after[id(numbers)] = (numbers, newest, repeated)
        return self._after[id(numbers)][1:]
