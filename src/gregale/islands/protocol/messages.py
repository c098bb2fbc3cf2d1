"""What the protocol is told (events), what it wants done (actions), and what members tell each other (headers in views).

A driver owns one `member.Member` and everything that is not pure: it turns what happens into events, hands each to
`Member.handle`, and carries out the actions that come back, in their order. Events for one member come one at a time.

    for action in member.handle(Seen(view)):
        match action:
            case Ask(header): ...          # ask the coordinator for a view; replaces an ask that is under way
            case Reduce(key, ...): ...     # later: handle(Reduced(key, digest)) or handle(ReduceFailed(key, names))

A header is everything that others may know of a member. The coordinator gathers the headers of all that ask into a view
and answers each of them with the same one. A header is a promise: what it says of held results stays true until its
member asks again, so a member acts on a view only if the view has the header of its newest ask (`asked`).
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gregale.islands.protocol.ledger import Ledger, digest_of

NO_ROUND = -1


class GarbageError(ValueError):
    """A header or record that a peer sent is not what this version writes."""


class Generation(NamedTuple):
    """A line of rounds. Its name is made of the view in which it began, so no two views begin the same one."""

    number: int
    name: str


NO_GENERATION = Generation(0, "")


@dataclass(frozen=True, slots=True)
class Outer:
    """What is agreed about a committed outer state; it travels with the state to joiners and into checkpoints.

    `digest` is the engine's, of parameters and optimizer state; `last` the key of the reduce that made the round;
    `voters` how many members took part in that reduce and stayed.
    """

    generation: Generation
    round: int
    digest: str
    last: str
    voters: int
    ledger: Ledger

    def fingerprint(self) -> str:
        """Digest of the state and of the ledger: what members compare."""
        return digest_of(self.digest, self.ledger.to_json())

    def to_json(self) -> dict[str, Any]:
        """As plain values, for a manifest or a checkpoint."""
        return {
            "generation": list(self.generation),
            "round": self.round,
            "digest": self.digest,
            "last": self.last,
            "voters": self.voters,
            "ledger": self.ledger.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> "Outer":
        """The record of `to_json`; anything else is a `GarbageError`."""
        fields = _fields(value, _OUTER, "record of an outer state")
        fields["generation"] = _generation(fields["generation"])
        try:
            fields["ledger"] = Ledger.from_json(fields["ledger"])
        except ValueError as error:
            raise GarbageError(str(error)) from None
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Held:
    """The result of a reduce that a member has, prepared and not committed.

    `digest` is that of the outer state (and ledger) that it would make, `voters` how many would be voters then.
    """

    key: str
    ballot: int
    digest: str
    voters: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a member tells all others when it asks for a view.

    name, session       who it is; `session` is random, new for every start of the process
    asked               counts the asks of this session
    agreement, version  what must be the same everywhere: hash of the configuration, version of Gregale
    hosts               addresses of the servers of the island's hosts, leader first
    round, generation   of its outer state; NO_ROUND: has none but the one of the common seed
    digest, last        of its outer state: `Outer.fingerprint` and the key that made it
    voter, voters       whether it took part in the reduce of its round, and how many did
    ballot, held        newest reduce it began for the next round, and the result it holds, if any
    failures, unreachable   reduces of the next round that failed here, and the names it could not reach in the last one
    ready, weight       its snapshot is taken; tokens that it brings
    seen                id of the newest view in which it was current; 0: none
    waited              it has waited `turnover_seconds` for members that are missing
    leaving             it goes after this round
    saved               newest round in a checkpoint of its own
    holder, used        data: whose lease it uses (its session, or the one restored) and how many examples of it so far
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
    held: Held | None = None
    failures: int = 0
    unreachable: tuple[str, ...] = ()
    ready: bool = False
    weight: float = 0.0
    seen: int = 0
    waited: bool = False
    leaving: bool = False
    saved: int = NO_ROUND
    holder: str = ""
    used: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Header":
        """The header of `to_json`; anything else is a `GarbageError` that says what is wrong with it."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise GarbageError("a header is not JSON") from None
        fields = _fields(value, _HEADER, "header")
        fields["generation"] = _generation(fields["generation"])
        for name in ("hosts", "unreachable"):
            if not all(isinstance(each, str) for each in fields[name]):
                raise GarbageError(f"a header's {name} is not a list of strings")
            fields[name] = tuple(fields[name])
        if fields["held"] is not None:
            fields["held"] = Held(**_fields(fields["held"], _HELD, "held result"))
        if not 0 <= fields["weight"] < float("inf"):
            raise GarbageError("a header's weight is not a number of tokens")
        return cls(**fields)


_HELD: dict[str, Any] = {"key": str, "ballot": int, "digest": str, "voters": int}
_OUTER: dict[str, Any] = {
    "generation": list,
    "round": int,
    "digest": str,
    "last": str,
    "voters": int,
    "ledger": dict,
}
_STRINGS = ("name", "session", "agreement", "version", "digest", "last", "holder")
_NUMBERS = ("asked", "round", "voters", "ballot", "failures", "seen", "saved", "used")
_HEADER: dict[str, Any] = {
    **dict.fromkeys(_STRINGS, str),
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(("voter", "ready", "waited", "leaving"), bool),
    **dict.fromkeys(("hosts", "unreachable", "generation"), list),
    "weight": (int, float),
    "held": (dict, type(None)),
}


def _fields(value: object, kinds: dict[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise GarbageError(f"a {what} does not have the fields of this version of Gregale")
    for name, kind in kinds.items():
        right = isinstance(value[name], kind) and (kind is bool or not isinstance(value[name], bool))
        if not right or (kind is int and value[name] < NO_ROUND):
            raise GarbageError(f"a {what} has no usable {name!r}")
    return dict(value)


def _generation(value: list[object]) -> Generation:
    if len(value) == 2 and type(value[0]) is int and value[0] >= 0 and isinstance(value[1], str):
        return Generation(value[0], value[1])
    raise GarbageError("a generation is not a number and a name")


@dataclass(frozen=True, slots=True)
class View:
    """The coordinator's answer: an id, which counts changes of membership, and the headers of all that are in it."""

    id: int
    headers: tuple[Header, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `now` in seconds of any clock that does not go back."""

    now: float


@dataclass(frozen=True, slots=True)
class Due:
    """The round after `round` is due: this island made its steps (`round` None), or a peer says so."""

    round: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trainer's message for the next round is on the host: `weight` tokens; `used` examples of its lease so far."""

    weight: float
    used: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The coordinator answered; headers with a bad signature or garbage are left out of the view already."""

    view: View


@dataclass(frozen=True, slots=True)
class NoView:
    """The coordinator did not answer the newest ask."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduce `key` is done and its outer step prepared: `digest` is the engine's, of the state that it would make."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The reduce `key` failed; `unreachable` are the names of the members that did not answer here."""

    key: str
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Healed:
    """A peer's outer state is here, hashed and complete; `outer` is what the state in hand is."""

    outer: Outer


@dataclass(frozen=True, slots=True)
class HealFailed:
    """No source gave a whole state."""

    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of `round` is complete."""

    round: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This island shall go: finish the round, hand over, leave. The trainer makes no more steps after its snapshot."""


Event = Tick | Due | Snapshot | Seen | NoView | Reduced | ReduceFailed | Healed | HealFailed | Saved | Leave


class Peer(NamedTuple):
    """A member of a reduce, or a source of a state."""

    name: str
    session: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the coordinator for a view with this header; an older ask that is under way no longer matters."""

    header: Header


@dataclass(frozen=True, slots=True)
class TellPeers:
    """Tell these addresses (of leaders) that the round after `round` is due; whether it arrives does not matter."""

    addresses: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Let the trainer take its message for the round after `round` at its next step boundary: answer with `Snapshot`."""

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
    outer: Outer
    weight: float


@dataclass(frozen=True, slots=True)
class Discard:
    """The prepared result of `key` will never be used."""

    key: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Let go of the group and of a reduce that is under way in it; no answer is awaited."""


@dataclass(frozen=True, slots=True)
class Heal:
    """Fetch the outer state from any of `sources`: this one or a newer one of theirs. Answer `Healed` or `HealFailed`.

    `digest` is its fingerprint (`Outer.fingerprint`). One heals at a time: a new `Heal` comes after the answer only.
    """

    sources: tuple[Peer, ...]
    generation: Generation
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The outer state stays, but its record is another: the fleet began, or went over to a new generation."""

    outer: Outer


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the user; a loud one is a warning."""

    text: str
    loud: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The fleet does not take this island: end with this line."""

    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """Nothing more to do here; `clean`: the last round was committed and the rest of the data handed back."""

    clean: bool


Action = Ask | TellPeers | TakeSnapshot | Reduce | Commit | Discard | DropGroup | Heal | Publish | Note | Refused | Left
