"""What members tell each other: headers, gathered in views; and the record of an outer state.

A header is everything that others may know of a member. The coordinator gathers the headers of all that ask into a view
and answers each of them with the same one. A header is a promise: what it says of held results stays true until its
member asks again, so a member acts on a view only if the view has the header of its newest ask (`asked`).
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gregale.islands.protocol.ledger import Ledger, digest_of
from gregale.islands.protocol.outliers import Size, median

NO_ROUND = -1


class GarbageError(ValueError):
    """A header or record that a peer sent is not what this version writes."""


class Generation(NamedTuple):
    """A line of rounds. Its name is made of the view in which it began, so no two views begin the same one."""

    number: int
    name: str


NO_GENERATION = Generation(0, "")


@dataclass(frozen=True, slots=True)
class OuterRecord:
    """What is agreed about a committed outer state; it travels with the state to joiners and into checkpoints.

    `digest` is the engine's, of parameters and optimizer state; `last` the key of the reduce that made the round;
    `voters` how many members began the reduce of the round (or the generation) and stayed; `sizes` those of the
    messages of the last rounds (`outliers`).
    """

    generation: Generation
    round: int
    digest: str
    last: str
    voters: int
    ledger: Ledger
    sizes: tuple[Size, ...] = ()

    def fingerprint(self) -> str:
        """Digest of the state and of what else is agreed: what members compare."""
        parts = self.digest, self.ledger.digest()
        return digest_of(*parts, self.sizes) if self.sizes else digest_of(*parts)

    def usual(self) -> Size | None:
        """What messages of the last rounds were like: `outliers`."""
        return median(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for a manifest or a checkpoint."""
        return {
            "generation": list(self.generation),
            "round": self.round,
            "digest": self.digest,
            "last": self.last,
            "voters": self.voters,
            "ledger": self.ledger.to_json(),
            "sizes": [list(size) for size in self.sizes],
        }

    @classmethod
    def from_json(cls, value: object) -> "OuterRecord":
        """The record of `to_json`; anything else is a `GarbageError`."""
        if isinstance(value, dict):
            value = {"sizes": [], **value}  # a record that an earlier version has saved has none
        fields = _fields(value, _OUTER, "record of an outer state")
        fields["generation"] = _generation(fields["generation"])
        fields["sizes"] = tuple(_size(size) for size in fields["sizes"])
        try:
            fields["ledger"] = Ledger.from_json(fields["ledger"])
        except ValueError as error:
            raise GarbageError(str(error)) from None
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """The result of a reduce that a member has, prepared and not committed.

    `digest` is that of the outer state (and ledger) that it would make. `members` are all that took part
    (`Header.identity`): only they can have committed it; `electors` are the voters of the round before among them.
    """

    key: str
    ballot: int
    digest: str
    members: tuple[str, ...]
    electors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """What a member tells all others when it asks for a view.

    name, session       who it is; `session` is random, new for every start of the process
    asked               counts the asks of this session
    agreement, version  what must be the same everywhere: settings and text (`services.agreement`), version
    hosts               addresses of the servers of the island's hosts, leader first
    batch               examples of a batch, by which its data is leased
    round, generation   of its outer state; NO_ROUND: has none but the one of the common seed
    digest, last        of its outer state: `OuterRecord.fingerprint` and the key that made it
    voter, voters       whether it took part in the reduce of its round, and how many did
    ballot, held        newest reduce it began for the next round, and the result it holds, if any
    failures, unreachable   reduces of the next round that failed here, and the names it could not reach in the last one
    ready, weight       its snapshot is taken; tokens that it brings
    norm                of its message, as `outliers` compares it; None: it is not finite
    usual               norm and weight of messages of the last rounds, of its outer state; None: there were none
    starved             it makes no more steps, because no data is leased to it
    seen                id of the newest view in which it was current; 0: none
    healing             it is fetching a state, so there is a fleet that has one
    awaited             rounds were faster than its healing so far, and now shall wait for it
    waited              it has waited `turnover_seconds` for members that are missing, or knows that they are dead
    fresh               its state is a checkpoint's: it has not been in a fleet since its process began
    again               its last view lacked voters too, and the grace for slow steps is over
    leaving             it goes after this round
    step_seconds        of its last steps, from which others learn their grace
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
            fields[name] = _strings(fields[name])
        if fields["held"] is not None:
            held = _fields(fields["held"], _HELD, "held result")
            fields["held"] = AcceptedResult(
                held["key"], held["ballot"], held["digest"], _strings(held["members"]), _strings(held["electors"])
            )
        if not (0 <= fields["weight"] < float("inf") and 0 <= fields["step_seconds"] < float("inf")):
            raise GarbageError("a header's weight or step_seconds is not a number")
        if fields["usual"] is not None:
            fields["usual"] = _size(fields["usual"])
        if fields["norm"] is not None and not 0 <= fields["norm"] < float("inf"):
            raise GarbageError("a header's norm is not a number")
        return cls(**fields)

    @property
    def identity(self) -> str:
        """Name and session as one word."""
        return f"{self.name}/{self.session}"


_HELD: dict[str, Any] = {"key": str, "ballot": int, "digest": str, "members": list, "electors": list}
_OUTER: dict[str, Any] = {
    "generation": list,
    "round": int,
    "digest": str,
    "last": str,
    "voters": int,
    "ledger": dict,
    "sizes": list,
}
_STRINGS = ("name", "session", "agreement", "version", "digest", "last", "holder")
_NUMBERS = ("asked", "round", "voters", "ballot", "failures", "seen", "used", "batch")
_HEADER: dict[str, Any] = {
    **dict.fromkeys(_STRINGS, str),
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(
        (
            "voter",
            "ready",
            "starved",
            "healing",
            "hold_rounds",
            "wait_expired",
            "from_checkpoint",
            "retried",
            "leaving",
        ),
        bool,
    ),
    **dict.fromkeys(("hosts", "unreachable", "generation"), list),
    "weight": (int, float),
    "norm": (int, float, type(None)),
    "usual": (list, type(None)),
    "step_seconds": (int, float),
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


def _strings(value: list[object]) -> tuple[str, ...]:
    if not all(isinstance(each, str) for each in value):
        raise GarbageError("a list in a header is not one of strings")
    return tuple(str(each) for each in value)


def _generation(value: list[object]) -> Generation:
    if len(value) == 2 and type(value[0]) is int and value[0] >= 0 and isinstance(value[1], str):
        return Generation(value[0], value[1])
    raise GarbageError("a generation is not a number and a name")


def _size(value: object) -> Size:
    if isinstance(value, list) and len(value) == 2 and all(type(each) in (int, float) for each in value):
        size = Size(float(value[0]), float(value[1]))
        if 0 < size.norm < float("inf") and 0 < size.weight < float("inf"):
            return size
    raise GarbageError("the size of a message is not two numbers above 0")


@dataclass(frozen=True, slots=True)
class View:
    """The coordinator's answer: an id, which counts changes of membership, and the headers of all that are in it."""

    id: int
    headers: tuple[Header, ...]


class Peer(NamedTuple):
    """A member of a reduce, or a source of a state."""

    name: str
    session: str
    hosts: tuple[str, ...]

    @property
    def identity(self) -> str:
        """As `Header.identity`."""
        return f"{self.name}/{self.session}"


def seed(digest: str) -> OuterRecord:
    """The record of an island that has nothing but the common seed; `digest` is the engine's of that state."""
    return OuterRecord(NO_GENERATION, NO_ROUND, digest, "", 0, Ledger())
