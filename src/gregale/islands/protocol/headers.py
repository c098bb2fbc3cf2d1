"""The headers of members, the views that collect them, and the record of an outer state.

A header is the public state of a member. The coordinator collects the headers of all requests in a view and returns
that view to each member. A header is a promise: its entries about held results stay true until the member's next
request. So a member acts on a view only if the view has the header of its newest request (`asked`).
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gregale.islands.protocol.ledger import Ledger, digest_of
from gregale.islands.protocol.outliers import Size, median
from gregale.islands.protocol.wire import NO_ROUND, GarbageError, decode


class Generation(NamedTuple):
    """A line of rounds. Its name is derived from the view in which it began, so no two views begin the same one."""

    number: int
    name: str


NO_GENERATION = Generation(0, "")


@dataclass(frozen=True, slots=True)
class OuterRecord:
    """The agreed facts about a committed outer state; joiners and checkpoints receive it with the state.

    `digest` is that of the parameters and optimizer state; `last` is the key of the reduce that made the round;
    `voters` is the number of members that began the reduce of the round (or the generation) and stayed; `sizes` are
    those of the messages of the last rounds (`outliers`).
    """

    generation: Generation
    round: int
    digest: str
    last: str
    voters: int
    ledger: Ledger
    sizes: tuple[Size, ...] = ()

    def fingerprint(self) -> str:
        """Return the digest of the state and of all other agreed facts, by which members compare records."""
        parts = self.digest, self.ledger.digest()
        return digest_of(*parts, self.sizes) if self.sizes else digest_of(*parts)

    def usual(self) -> Size | None:
        """Return the median size of the messages of the last rounds (`outliers`)."""
        return median(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for a manifest or a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "OuterRecord":
        """Return the record of `to_json`; raise `GarbageError` for anything else."""
        if isinstance(value, dict):
            value = {"sizes": [], **value}  # records of earlier versions lack this field
        found: OuterRecord = decode(cls, value, "record of an outer state")
        spans = [*found.ledger.free, *(span for lease in found.ledger.leases for span in lease.spans)]
        if any(start >= stop for start, stop in spans):
            raise GarbageError("a ledger of leases is not one that Gregale writes")
        _check_sizes(found.sizes)
        return found


def _check_sizes(sizes: tuple[Size, ...]) -> None:
    if not all(size.norm > 0 and size.weight > 0 for size in sizes):
        raise GarbageError("the size of a message is not two numbers above 0")


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """The result of a reduce that a member has prepared and not committed.

    `digest` is that of the outer state (and ledger) after a commit. `members` are the identities of the group: only
    they can have committed it. `electors` are the voters of the previous round among them.
    """

    key: str
    ballot: int
    digest: str
    members: tuple[str, ...]
    electors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """The public state of a member, which it sends with each request for a view.

    name, session       the identity; `session` is random, new for every start of the process
    asked               the number of this request in the session
    agreement, version  values that must be equal in all islands: settings and text (`agreement`), version
    hosts               addresses of the servers of the island's hosts, host 0 first
    batch               examples of a batch, the unit of its leases
    round, generation   of its outer state; NO_ROUND: it has only the state of the common seed
    digest, last        of its outer state: `OuterRecord.fingerprint` and the key that made it
    voter, voters       whether it took part in the reduce of its round, and how many members did
    ballot, held        newest ballot that it began for the next round, and the result that it holds, if any
    failures, unreachable   failed reduces of the next round here, and the names that did not answer in the last one
    ready, weight       its message is available; the message's tokens
    norm                of its message, as `outliers` compares it; None: it is not finite
    usual               median norm and weight of the messages of the last rounds; None: there were none
    starved             it makes no more steps, because no data is leased to it
    seen                id of the newest view in which it was current; 0: none
    healing             it is fetching a state, so there is a fleet that has one
    hold_rounds         rounds were faster than its healing so far, and must now wait for it
    wait_expired        it has waited `turnover_seconds` for missing members, or knows that they are dead
    from_checkpoint     its state is a checkpoint's: it has not been in a fleet since its process began
    retried             its last view lacked voters too, and the grace for slow steps is over
    leaving             it leaves after this round
    step_seconds        of its last steps, from which others learn their grace
    holder, used        data: the session that holds its lease (its own, or the restored one), and the used examples
    """

    name: str
    session: str
    asked: int
    agreement: str
    version: str
    hosts: tuple[str, ...]
    round: int = NO_ROUND
    generation: Generation = NO_GENERATION
    digest: str = ""
    last: str = ""
    voter: bool = False
    voters: int = 0
    ballot: int = 0
    held: AcceptedResult | None = None
    failures: int = 0
    unreachable: tuple[str, ...] = ()
    ready: bool = False
    weight: float = 0.0
    norm: float | None = 0.0
    usual: Size | None = None
    starved: bool = False
    seen: int = 0
    healing: bool = False
    hold_rounds: bool = False
    wait_expired: bool = False
    from_checkpoint: bool = False
    retried: bool = False
    leaving: bool = False
    batch: int = 1
    holder: str = ""
    used: int = 0
    step_seconds: float = 0.0

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Header":
        """Return the header of `to_json`; raise `GarbageError` with the reason for anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise GarbageError("a header is not JSON") from None
        found: Header = decode(cls, value, "header")
        _check_sizes((found.usual,) if found.usual else ())
        return found

    @property
    def identity(self) -> str:
        """Name and session as one word."""
        return f"{self.name}/{self.session}"


@dataclass(frozen=True, slots=True)
class View:
    """The coordinator's answer: an id that counts changes of membership, and the headers of all members in it."""

    id: int
    headers: tuple[Header, ...]


class Peer(NamedTuple):
    name: str
    session: str
    hosts: tuple[str, ...]

    @property
    def identity(self) -> str:
        """Name and session, as `Header.identity`."""
        return f"{self.name}/{self.session}"


def seed(digest: str) -> OuterRecord:
    """Return the record of an island that has only the state of the common seed, with its `digest`."""
    return OuterRecord(NO_GENERATION, NO_ROUND, digest, "", 0, Ledger())
