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

NO_ROUND = -1


class GarbageError(ValueError):
    """A header or record of a peer does not have the format of this version."""


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
        """Return the record of `to_json`; raise `GarbageError` for anything else."""
        if isinstance(value, dict):
            value = {"sizes": [], **value}  # records of earlier versions lack this field
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
    """The coordinator's answer: an id that counts changes of membership, and the headers of all members in it."""

    id: int
    headers: tuple[Header, ...]


class Peer(NamedTuple):
    """A member of a reduce, or a source of a state."""

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
