"""The protocol's events (input) and actions (output); `headers` has the data that members exchange.

A driver owns one `member.Member` and everything that is not pure. It converts observations to events, passes each to
`Member.handle`, and carries out the resulting actions in order. Events for one member come one at a time.
"""

from dataclasses import dataclass

from gregale.islands.protocol.headers import NO_ROUND, Generation, Header, OuterRecord, Peer, View


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
