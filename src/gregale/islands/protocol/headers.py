"""The headers of members, the views that collect them, and the record of an outer state.

A header is the public state of a member. The coordinator collects the headers of all requests in a view and returns
that view to each member. A header is a promise: its entries about held results stay true until the member's next
request. So a member acts on a view only if the view has the header of its newest request (`asked`).
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from gregale.islands.protocol.ledger import Ledger, digest_of
from gregale.islands.protocol.outliers import Size
from gregale.islands.protocol.wire import NO_ROUND, GarbageError, decode


class Generation(NamedTuple):
    """A line of rounds. Its name is derived from the view in which it began, so no two views begin the same one."""

    number: int
    name: str


NO_GENERATION = Generation(0, "")


@dataclass(frozen=True, slots=True)
class OuterRecord:
    """The agreed facts about a committed outer state; joiners and checkpoints receive it with the state."""

    generation: Generation
    round: int
    digest: str  # of the parameters and optimizer state
    last: str  # the key of the reduce that made the round
    voters: int  # members that began the reduce of the round (or the generation) and stayed
    ledger: Ledger
    sizes: tuple[Size, ...] = ()  # of the messages of the last rounds (`outliers`)

    def fingerprint(self) -> str:
        """Return the digest of the state and of all other agreed facts, by which members compare records."""
        parts = self.digest, self.ledger.digest()
        return digest_of(*parts, self.sizes) if self.sizes else digest_of(*parts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for a manifest or a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "OuterRecord":
        """Return the record of `to_json`; raise `GarbageError` for anything else."""
        found: OuterRecord = decode(cls, value, "record of an outer state")
        spans = [*found.ledger.free, *(span for lease in found.ledger.leases for span in lease.spans)]
        if any(start >= stop for start, stop in spans):
            raise GarbageError("a ledger of leases is not one that Gregale writes")
        return found


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
    stamp: int = 0  # `View.stamp` of the view in which this member accepted it


@dataclass(frozen=True, slots=True)
class Header:
    """The public state of a member, which it sends with each request for a view."""

    name: str
    session: str  # random, new for every start of the process; with the name, the identity
    asked: int  # the number of this request in the session
    agreement: str  # settings and text that must be equal in all islands
    version: str  # must be equal too
    hosts: tuple[str, ...]  # addresses of the servers of the island's hosts, host 0 first; the coordinator checks them
    round: int = NO_ROUND  # of its outer state; NO_ROUND: it has only the state of the common seed
    generation: Generation = NO_GENERATION  # of its outer state
    digest: str = ""  # of its outer state: `OuterRecord.fingerprint`
    last: str = ""  # the key of the reduce that made its outer state
    voter: bool = False  # whether it took part in the reduce of its round
    voters: int = 0  # how many members took part
    ballot: int = 0  # newest ballot that it began for the next round
    held: AcceptedResult | None = None  # the result that it holds, if any
    failures: int = 0  # failed reduces of the next round here
    unreachable: tuple[str, ...] = ()  # the names that did not answer in the last one
    ready: bool = False  # its message is available
    weight: float = 0.0  # the message's tokens
    norm: float | None = 0.0  # of its message, as `outliers` compares it; None: it is not finite
    usual: Size | None = None  # median norm and weight of the messages of the last rounds; None: there were none
    starved: bool = False  # it makes no more steps, because no data is leased to it
    seen: int = 0  # id of the newest view in which it was current; 0: none
    healing: bool = False  # it is fetching a state, so there is a fleet that has one
    hold_rounds: bool = False  # rounds were faster than its healing so far, and must now wait for it
    wait_expired: bool = False  # it has waited `turnover_seconds` for missing members, or knows that they are dead
    from_checkpoint: bool = False  # it has not been in a fleet since its process began
    retried: bool = False  # its last view lacked voters too, and the grace for slow steps is over
    leaving: bool = False  # it leaves after this round
    batch: int = 1  # examples of a batch, the unit of its leases
    holder: str = ""  # the session that holds its lease: its own, or the restored one
    used: int = 0  # examples of that lease
    step_seconds: float = 0.0  # of its last steps, from which others learn their grace
    link: int = 0  # level of its link's rate (`split`); 0: unknown
    recorded: str = ""  # the digest of the last state of the run, if most coordinators have recorded it
    # Only with `Rules.majority`:
    electors: tuple[str, ...] = ()  # identities of the voters, as far as it knows them
    prepared: bool = False  # whether it has the data of the result that it holds
    dead: tuple[str, ...] = ()  # voters whose processes are certainly dead
    known: tuple[str, ...] = ()  # names of islands with a lease of data

    @property
    def identity(self) -> str:
        return f"{self.name}/{self.session}"


# The format of requests and views, in which islands and the coordinator must agree; the number counts other changes.
FORMAT = digest_of(5, [each.name for kind in (Header, AcceptedResult) for each in fields(kind)])


@dataclass(frozen=True, slots=True)
class View:
    """The coordinator's answer: an id that counts changes of membership, and the headers of all members in it.

    The stamps of all coordinators' views are different, and increase with the requests of each member (`choice`).
    """

    id: int
    headers: tuple[Header, ...]
    stamp: int = 0


class Peer(NamedTuple):
    name: str
    session: str
    hosts: tuple[str, ...]

    @property
    def identity(self) -> str:
        return f"{self.name}/{self.session}"


def seed(digest: str) -> OuterRecord:
    """Return the record of an island that has only the state of the common seed, with its `digest`."""
    return OuterRecord(NO_GENERATION, NO_ROUND, digest, "", 0, Ledger())
