"""The protocol's events (input) and actions (output); and the headers, settings and wire format that members exchange.

A driver owns one `member.Member` and everything that is not pure. It converts observations to events, passes each to
`Member.handle`, and carries out the resulting actions in order. Events for one member come one at a time."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from gregale.islands.config import IslandsConfig
from gregale.islands.protocol.ledger import LeasePolicy, Ledger, digest_of
from gregale.islands.protocol.outliers import Size


@dataclass(frozen=True)
class Timing:
    """Seconds. The defaults are those of `LAN`."""

    heartbeat_seconds: float = 2.0  # silence after which an island is out of the fleet (the coordinator's rule)
    join_seconds: float = 2.0  # a part of `gather_seconds`, longer than a round trip
    reduce_seconds: float = 5.0  # the limit of one reduce
    grace_seconds: float | None = None  # a round's wait for a member's step; None: `GRACE_STEPS` of the fastest member
    max_grace_seconds: float = 10.0  # the limit of the learned grace
    ping_seconds: float = 0.2  # interval of the announcements to peers that a round is due
    retry_seconds: float = 0.2  # pause before an unsuccessful request is repeated
    turnover_seconds: float = 8.0  # wait of half of the fleet or less for the others, which may have continued alone
    leave_seconds: float = 20.0  # how long a leaver waits for its last round, and a closing round for a message
    hold_seconds: float = 2.0  # interval in which the coordinator confirms that it still holds a request
    network_seconds: float = 3.0  # the limit of a message to the coordinator and its reply
    heal_seconds: float = 120.0  # the limit of a transfer of the state

    @property
    def gather_seconds(self) -> float:
        """The coordinator's wait for other members, which may pause before they repeat their requests."""
        return self.join_seconds + self.retry_seconds

    @property
    def linger_seconds(self) -> float:
        """How long a complete island waits for another one to fetch its state."""
        return self.leave_seconds + self.turnover_seconds

    @property
    def ask_seconds(self) -> float:
        """The time after which a request without view or confirmation has failed."""
        return self.hold_seconds + self.network_seconds


LAN = Timing()
WAN = Timing(
    heartbeat_seconds=10.0,
    join_seconds=3.0,
    reduce_seconds=60.0,
    max_grace_seconds=60.0,
    ping_seconds=1.0,
    retry_seconds=1.0,
    turnover_seconds=40.0,
    leave_seconds=180.0,
    heal_seconds=1800.0,
)
_KEYS = ("heartbeat_seconds", "grace_seconds", "reduce_seconds", "heal_seconds")


def timing_of(config: IslandsConfig) -> Timing:
    """Return the limits of the configured network, with the values that the user gave."""
    base = LAN if config.network == "lan" else WAN
    return replace(base, **{key: value for key in _KEYS if (value := getattr(config, key)) is not None})


@dataclass(frozen=True)
class Rules:
    """The parameters that must agree, so that the same view leads to the same decision: part of the agreement."""

    minimum: int = 1  # the smallest number of members in a view that make a round
    lease_policy: LeasePolicy = field(default_factory=LeasePolicy)  # the size of data leases
    start: int = 1  # the smallest number of members with which a fleet begins, anew or from checkpoints
    lockstep: bool = False  # a round waits until all live members have their messages
    outlier: float = 10.0  # a message with a norm above this multiple of the expected norm contributes nothing
    stages: tuple[int, ...] = ()  # the number of rounds after which each stage but the first begins
    fragments: tuple[int, ...] = (1,)  # of each stage: a round changes one
    closing: float = math.inf  # from this round on no steps come between rounds, and each waits for all messages
    majority: bool = False  # there are several coordinators: only more than half of the voters continue

    @property
    def rounds(self) -> float:
        """The number of rounds of the whole run: a closing round of each fragment comes after the others."""
        return self.closing + self.fragments[-1]

    def fragments_at(self, round: int) -> int:
        return self.fragments[min(self.stage_at(round), len(self.fragments) - 1)]

    def stage_at(self, round: int) -> int:
        """Return the number of the stage, from 0, that the fleet is in after so many rounds."""
        return sum(first <= round for first in self.stages)


NO_ROUND = -1
Columns = Mapping[str, tuple[list[Any], list[int]]]
INVALID = ...  # in place of a value whose text is not JSON
_hints = cache(get_type_hints)


class GarbageError(ValueError):
    """A header or record of a peer does not have the format of this version."""


def to_texts(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON text of each value of a header."""
    return {key: json.dumps(value, separators=(",", ":"), allow_nan=False) for key, value in header.items()}


def pack(headers: Sequence[Mapping[str, str]]) -> Columns:
    """Return headers of texts as columns; an absent key counts as null."""
    columns = {}
    for key in dict.fromkeys(key for each in headers for key in each):
        texts = [each.get(key, "null") for each in headers]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        columns[key] = list(places), [places[text] for text in texts]
    return columns


def read_texts(columns: Columns) -> Columns:
    """Return the columns with the values of their texts."""
    return {key: ([_read(text) for text in texts], places) for key, (texts, places) in columns.items()}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return INVALID


def unpack(columns: Columns, key: str) -> list[Any]:
    values, places = columns[key]
    return [values[place] for place in places]


def decode_all(kind: Any, columns: Columns, what: str) -> list[Any]:
    """Return each packed object as `decode` does, or its `GarbageError`; ignore other keys."""
    fields = []
    for name, hint in _hints(kind).items():
        values, places = columns[name]
        checked = [_checked(hint, each, name, what) for each in values]
        fields.append([checked[place] for place in places])
    rows = zip(*fields, strict=True)
    return [next((each for each in row if isinstance(each, GarbageError)), None) or kind(*row) for row in rows]


def decode(kind: Any, value: object, what: str) -> Any:
    """Return the dataclass `kind` from a JSON object with its fields; raise `GarbageError`, which names `what`.

    Named tuples are JSON lists. Numbers are not negative, except that `round` may be `NO_ROUND`.
    """
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise GarbageError(f"a {what} does not have the fields of this version of Gregale")
    [found] = decode_all(kind, {name: ([each], [0]) for name, each in value.items()}, what)
    if isinstance(found, GarbageError):
        raise found
    return found


def _checked(kind: Any, value: Any, name: str, what: str) -> Any:
    """Return a field's value as type `kind`, or the `GarbageError` that rejects it."""
    try:
        return _value(kind, value, name)
    except TypeError:
        return GarbageError(f"a {what} has no usable {name!r}")
    except GarbageError as error:
        return error


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return a field's value as type `kind`. Raises TypeError, and `GarbageError` for a part that is a dataclass."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _value(arguments[0], value, name)
    if is_dataclass(kind):
        return decode(kind, value, name)
    if type(value) in (list, tuple):
        if fields := getattr(kind, "_fields", None):
            return kind(*_values(list(_hints(kind).values()), value, fields))
        if get_origin(kind) is tuple:
            kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
            return tuple(_values(kinds, value, [name] * len(kinds)))
    if kind is float:
        if type(value) in (int, float) and 0 <= value < float("inf"):
            return float(value)
        raise TypeError
    if type(value) is not kind or (kind is int and value < (NO_ROUND if name == "round" else 0)):
        raise TypeError
    return value


def _values(kinds: Any, values: Any, names: Any) -> list[Any]:
    if not len(kinds) == len(values) == len(names):
        raise TypeError
    return [_value(*each) for each in zip(kinds, values, names, strict=True)]


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
    copy_seconds: float = 0.0  # from handovers of its last messages until they were on the host; 0: nobody waits for it
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


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `now` is in seconds of a monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True)
class RoundDue:
    """The round after `round` is due: this island made its steps (`round` None), or a peer announces it.

    Once is enough until `Commit`, `Install` or the `Publish` of round 0, with each of which a new interval begins. An
    island that has handed over its message repeats the event after as many steps. It is asked for another message as
    soon as no reduce can depend on the old one.
    """

    round: int | None = None


@dataclass(frozen=True, slots=True)
class MessageReady:
    """The trainer's message for the round after `round` is on the host.

    It contains `weight` tokens; `used` examples of its leases were used so far. `final`: the trainer makes no step
    after it, because the island leaves. `norm`: root mean square of the message; None: it is not finite. `link`: level
    of the link's rate (`split`), 0: unknown.
    """

    round: int
    weight: float
    used: int
    final: bool = False
    norm: float | None = 0.0
    link: int = 0


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """Between two steps, the trainer can hand over a message for the round after `round`, which is not due yet.

    A `RequestMessage` in the answer asks for it; without that, the message that there is stays.
    """

    round: int


@dataclass(frozen=True, slots=True)
class ViewReceived:
    """The coordinator answered; the view excludes headers with a bad signature or format."""

    view: View


@dataclass(frozen=True, slots=True)
class ViewFailed:
    """The coordinator cannot be reached for the request. A later answer must not be passed on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat failed with this `error`, or the coordinator answered it.

    - `held`: what the next view waits for
    - `newest`: the newest round that an island which the coordinator hears has reported
    - `behind`: how many of these islands have reported an older one
    - `recorded`: the digest of the run's last state that most coordinators have recorded
    """

    error: str = ""
    held: str = ""
    newest: int = NO_ROUND
    behind: int = 0
    recorded: str = ""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduce `key` is done and its outer step prepared: `digest` is that of the resulting state."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The reduce `key` failed; `unreachable` are the names of the members that did not answer here.

    `overflowed`: all messages came, and the outer step made from them is not finite.
    """

    key: str
    unreachable: tuple[str, ...] = ()
    overflowed: bool = False


@dataclass(frozen=True, slots=True)
class Healed:
    """A peer's outer state is fetched, hashed and complete, beside the own one; `outer` is its record.

    An `Install` in the answer replaces the own state with it; without that it is discarded.
    """

    outer: OuterRecord


@dataclass(frozen=True, slots=True)
class HealFailed:
    """No source delivered a complete state."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeersDead:
    """The answer to `ProbePeers`: the identities of processes that are certainly dead."""

    identities: frozenset[str]


@dataclass(frozen=True, slots=True)
class Saved:
    """This complete island has saved its last state, and ends with it if most coordinators record it: see `verdict`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The island leaves: a last round with a `final` message, then `LeaveDone`."""


Event = (
    Tick | RoundDue | MessageReady | EarlyMessage | ViewReceived | ViewFailed | Heartbeat | Reduced | ReduceFailed
    | Healed | HealFailed | PeersDead | Saved | Leave
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestView:
    """Request a view of `needed` members or more with this header. Answer with `ViewReceived` or `ViewFailed`.

    There is one request at a time, except that after `Healed` a new one replaces an unanswered one: the older one's
    answer must not be passed on.
    """

    header: Header
    needed: int


@dataclass(frozen=True, slots=True)
class AnnounceRound:
    """Announce to these addresses (of hosts 0) that the round after `round` is due; delivery is optional.

    They are few of the members, which announce it in turn.
    """

    addresses: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """Request the trainer's message for the round after `round` at its next step boundary: answer `MessageReady`."""

    round: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce the fragment of the round after `round` among `members` (rank order) with these weights; prepare its step.

    A member with weight 0 sends no message but takes part. A result held from an older key stays until `Discard`.
    `parts`: of the message, that each member averages (`split`); (): the same.
    """

    key: str
    round: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the prepared result of `key` as the outer state with the record `outer`. Publish both together.

    `weight` is the contribution of this island: with 0 its steps stay, on the new state.
    """

    key: str
    outer: OuterRecord
    weight: float


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete the prepared result of `key`, which will never be used."""

    key: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Drop the group and a reduce in progress in it; no answer is expected."""


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Find out which absent members of the last round are dead. Answer `PeersDead`; a late answer does no harm."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Heal:
    """Fetch the outer state, this one or a newer one, from any of `sources`. Answer `Healed` or `HealFailed`.

    `digest` is its fingerprint (`OuterRecord.fingerprint`). One heal runs at a time: the next `Heal` follows the
    answer.
    """

    sources: tuple[Peer, ...]
    generation: Generation
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Install:
    """Replace the outer state with the fetched state. Publish both together.

    `keeps`: the island's steps since it last contributed stay, on the new state; no round has them yet.
    """

    outer: OuterRecord
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Keep the outer state, replace its record: the fleet began or changed its generation. A round stays due."""

    outer: OuterRecord


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset this diverged island: its parameters to the outer ones, its inner optimizer to a peer's.

    `peers` contributed to the round; with none, values of the own optimizer that are not finite are set to 0.
    """

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the user; a loud one is a warning."""

    text: str
    loud: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A line for the user: this island contributes to no round (`is_left_out`), or to rounds again."""

    text: str
    is_left_out: bool = True


@dataclass(frozen=True, slots=True)
class Rejected:
    """The fleet rejects this island: end with this line."""

    text: str


@dataclass(frozen=True, slots=True)
class LeaveDone:
    """The island has left: its last round is committed and its unused data returned, or that took too long."""


Action = (
    RequestView | AnnounceRound | RequestMessage | Reduce | Commit | Discard | DropGroup | ProbePeers | Heal | Install
    | Publish | Reset | LogLine | LeftOut | Rejected | LeaveDone
)  # fmt: skip
