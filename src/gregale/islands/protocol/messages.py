"""What the protocol is told (events) and what it wants done (actions); `headers` has what members tell each other.

A driver owns one `member.Member` and everything that is not pure: it turns what happens into events, hands each to
`Member.handle`, and carries out the actions that come back, in their order. Events for one member come one at a time.

    for action in member.handle(Seen(view)):
        match action:
            case Ask(header): ...         # ask the coordinator; later: handle(Seen(view)) or NoView
            case Reduce(key, ...): ...    # later: handle(Reduced(key, digest)) or handle(ReduceFailed(key, names))
"""

from dataclasses import dataclass

from gregale.islands.protocol.headers import Generation, Header, OuterRecord, Peer, View


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `now` in seconds of any clock that does not go back."""

    now: float


@dataclass(frozen=True, slots=True)
class RoundDue:
    """The round after `round` is due: this island made its steps (`round` None), or a peer says so.

    Once is enough until `Commit`, `Install` or the `Publish` of round 0, with each of which a new interval begins. An
    island that has handed over its message says so again after as many steps: it is asked for another message as soon
    as no reduce can depend on the old one.
    """

    round: int | None = None


@dataclass(frozen=True, slots=True)
class MessageReady:
    """The trainer's message for the round after `round` is on the host.

    `weight` tokens went into it; `used` examples of its leases were used so far; a step takes `step_seconds` of late.
    `final`: the trainer makes no step after it, because the island leaves. `norm`: root mean square of the message;
    None: it is not finite.
    """

    round: int
    weight: float
    used: int
    step_seconds: float = 0.0
    final: bool = False
    norm: float | None = 0.0


@dataclass(frozen=True, slots=True)
class ViewReceived:
    """The coordinator answered; headers with a bad signature or garbage are left out of the view already."""

    view: View


@dataclass(frozen=True, slots=True)
class ViewFailed:
    """The coordinator did not answer the ask. An answer that comes after this must not be told."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduce `key` is done and its outer step prepared: `digest` is the engine's, of the state it would make."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The reduce `key` failed; `unreachable` are the names of the members that did not answer here.

    `overflowed`: all messages came, and the outer step that they make is not finite.
    """

    key: str
    unreachable: tuple[str, ...] = ()
    overflowed: bool = False


@dataclass(frozen=True, slots=True)
class Healed:
    """A peer's outer state is here, hashed and complete, beside the own one; `outer` is its record.

    It becomes the own one by `Install` in the answer; without that it is of no use.
    """

    outer: OuterRecord


@dataclass(frozen=True, slots=True)
class HealFailed:
    """No source gave a whole state."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeersDead:
    """The answer to `ProbePeers`: processes (`Peer.identity`) that are certain to live no more. Guess none."""

    identities: frozenset[str]


@dataclass(frozen=True, slots=True)
class Leave:
    """This island shall go: a last round with a `final` snapshot, then `LeaveDone`."""


Event = (
    Tick
    | RoundDue
    | MessageReady
    | ViewReceived
    | ViewFailed
    | Reduced
    | ReduceFailed
    | Healed
    | HealFailed
    | PeersDead
    | Leave
)


@dataclass(frozen=True, slots=True)
class RequestView:
    """Ask the coordinator for a view with this header. Answer with `ViewReceived` or `ViewFailed`.

    There is one ask at a time, but after `Healed` a new one takes the place of one that is not answered yet: the
    older one's answer must not be told any more. Send an ask once: a repeated one would put an old promise into a
    later view.
    """

    header: Header


@dataclass(frozen=True, slots=True)
class AnnounceRound:
    """Tell these addresses (of leaders) that the round after `round` is due; whether it arrives does not matter."""

    addresses: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """Let the trainer take its message for the round after `round` at its next step boundary: answer `MessageReady`."""

    round: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce the fragment of the round after `round` among `members` (rank order) with these weights; prepare its step.

    A member with weight 0 sends nothing of its own but takes part. A result held from an older key stays until
    `Discard`.
    """

    key: str
    round: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The prepared result of `key` is the outer state now; `outer` says which. Publish both together.

    `weight` is what this island contributed: one that contributed 0 does not mix.
    """

    key: str
    outer: OuterRecord
    weight: float


@dataclass(frozen=True, slots=True)
class Discard:
    """The prepared result of `key` will never be used."""

    key: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Let go of the group and of a reduce that is under way in it; no answer is awaited."""


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Find out which absent members of the last round are dead. Answer `PeersDead`; a late answer does no harm."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Heal:
    """Fetch the outer state from any of `sources`: this one or a newer one of theirs. Answer `Healed` or `HealFailed`.

    `digest` is its fingerprint (`OuterRecord.fingerprint`). One heals at a time: the next `Heal` follows the answer.
    """

    sources: tuple[Peer, ...]
    generation: Generation
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Install:
    """The state that was fetched is the outer state now. Publish both together."""

    outer: OuterRecord


@dataclass(frozen=True, slots=True)
class Publish:
    """The outer state stays, but its record is another: the fleet began, or went over to a new generation.

    A round that was due stays due.
    """

    outer: OuterRecord


@dataclass(frozen=True, slots=True)
class Reset:
    """This island has diverged: the outer parameters replace its own, and the inner optimizer of a peer its own.

    `peers` contributed to the round; with none, what is not finite in the own optimizer is forgotten.
    """

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the user; a loud one is a warning."""

    text: str
    loud: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """The fleet does not take this island: end with this line."""

    text: str


@dataclass(frozen=True, slots=True)
class LeaveDone:
    """Nothing more to do here; `clean`: the last round was committed and the rest of the data handed back."""

    clean: bool


Action = (
    RequestView | AnnounceRound | RequestMessage | Reduce | Commit | Discard | DropGroup | ProbePeers | Heal | Install
    | Publish | Reset | LogLine | Rejected | LeaveDone
)  # fmt: skip
