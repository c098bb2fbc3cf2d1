"""The membership of a fleet and its views: the coordinator's rules, without sockets, clocks or threads.

A name has one owner, a session of a process. A name is *healthy* while its owner sent a heartbeat or a request within
its `heartbeat_seconds`; after that it has no owner. A request is held until a view answers it, and every view has all
pending requests. A tick forms a view if at least `needed` names have a request, in two cases:

- fast: all names of the last view have one;
- slow: more than half of the healthy names have one, and either all healthy names have one or that was so for
  `gather_seconds`.

A name *runs* if it has reported a round. A view without such a name may begin a fleet, so it is not formed while there
is one, nor before the names that run had the time for a heartbeat since the coordinator's start.

The islands give these numbers with their requests: the smallest `needed`, and the largest `gather_seconds`. The
coordinator has none of its own.

| event | rule |
|---|---|
| a view forms | all pending requests are answered; the id increases by one only if the set of names has changed |
| the only name of the last view sends a request | it is answered at once; other requests of that moment are in the view too |
| a healthy name sends no request | the others are answered after `gather_seconds`, if they are more than half |
| a session sends another request | the request with the higher number replaces the other, which is dropped |
| a request arrives late or twice | a request with a number that was replaced is dropped; the newest one gets its view again |
| a member gives up a request | the request can be in a view until the next one of the member arrives |
| a process dies | its name is healthy for `heartbeat_seconds`, and its pending request can be in a view until then |
| a process leaves | its name is not healthy any more |
| another session uses a name that has an owner | it waits. If the owner sends a heartbeat, it is refused; if the owner is silent for `heartbeat_seconds`, it becomes the owner |
| the coordinator restarts | it has no members; its first id is one that no member has seen (`first_id`) |
"""  # noqa: E501

import math
from dataclasses import dataclass, replace
from typing import Any

from gregale.distributed.agreement import listed

BEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, eq=False, slots=True)
class Ask:
    """A member's request for a view."""

    name: str
    session: str
    number: int  # increases with the requests of one session
    header: Any  # this member's header, for all members of the view
    needed: int  # the smallest number of members in a view that are of use to this one
    gather_seconds: float
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class Formed:
    """A view: an id that counts changes of membership, and its requests sorted by name."""

    id: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request: a view, a refusal, or neither if the request is dropped."""

    ask: Ask
    view: Formed | None = None
    refused: str = ""


@dataclass(slots=True)
class Owner:
    """A session that owns a name, or claims it (`ask`: with this request, since `since`)."""

    session: str
    heard: float
    heartbeat_seconds: float
    runs: bool = False
    newest: int = -1  # number of its newest request that a view answered
    view: Formed | None = None  # that view
    ask: Ask | None = None
    since: float = 0.0
    rival: "Owner | None" = None


class Membership:
    """The state of a coordinator. Times are seconds of one clock; ticks may be any time apart."""

    def __init__(self, first_id: int = 1):
        self._id = first_id - 1
        self._owners: dict[str, Owner] = {}
        self._answers: list[Answer] = []
        self._enough_since: float | None = None  # when enough names had a request for a view
        self._started = math.inf  # the first tick
        self.pending: dict[str, Ask] = {}  # by name
        self.last: frozenset[str] | None = None

    @property
    def healthy(self) -> dict[str, str]:
        """Sessions by name, as of the last tick."""
        return {name: owner.session for name, owner in self._owners.items()}

    @property
    def heartbeat_seconds(self) -> float:
        """The longest silence of a healthy name."""
        return max((owner.heartbeat_seconds for owner in self._owners.values()), default=0.0)

    def held(self, name: str) -> str:
        """Return why the request of `name` is held; empty if it has none."""
        if name not in self.pending:
            return ""
        if len(self.pending) < (needed := self._needed()):
            return f"{len(self.pending)} of at least {needed} islands are here ({listed(sorted(self.pending))})"
        others = sorted(self._owners.keys() - self.pending.keys())
        return f"the coordinator waits for the requests of {listed(others)}" if others else ""

    def beat(self, name: str, session: str, heartbeat_seconds: float, runs: bool, now: float) -> None:
        owner = self._heard(name, session, heartbeat_seconds, now)
        if owner.session != session:
            return
        owner.runs, rival = runs, owner.rival
        if rival and now - rival.since >= owner.heartbeat_seconds:  # earlier ones may have been sent before the claim
            owner.rival = None
            assert rival.ask is not None
            self._answers.append(Answer(rival.ask, refused=f"another island of the fleet has the name {name!r}"))

    def ask(self, ask: Ask, now: float) -> None:
        """Record a member's request; a later tick answers it."""
        owner = self._heard(ask.name, ask.session, ask.heartbeat_seconds, now)
        if owner.session != ask.session:
            self._claim(owner, ask, now)
            return
        pending = self.pending.get(ask.name)
        if ask.number == owner.newest and not pending:  # the member has not received the view
            self._answers.append(Answer(ask, owner.view))
            return
        if ask.number <= owner.newest or (pending and ask.number < pending.number):
            self._forget(ask)
            return
        if pending:
            self._forget(pending)
        self.pending[ask.name] = ask

    def leave(self, name: str, session: str) -> None:
        """Record the end of a process; a session that claims its name becomes the owner."""
        owner = self._owners.get(name)
        if owner and owner.session == session:
            self._end(name, owner)
        elif owner and owner.rival and owner.rival.session == session:
            owner.rival = None

    def tick(self, now: float) -> list[Answer]:
        """Return the answers that are due."""
        self._started = min(self._started, now)
        self._lapse(now)
        view = self._form(now)
        answers, self._answers = self._answers, []
        return answers + ([Answer(ask, view) for ask in view.asks] if view else [])

    def _heard(self, name: str, session: str, heartbeat_seconds: float, now: float) -> Owner:
        """Update the time of the last heartbeat; return the name's owner, this session if there was none."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(session, now, heartbeat_seconds)
        for each in (owner, owner.rival):
            if each and each.session == session:
                each.heard = max(each.heard, now)
        return owner

    def _claim(self, owner: Owner, ask: Ask, now: float) -> None:
        since = now
        if (rival := owner.rival) and rival.ask:
            self._forget(rival.ask)
            since = rival.since if rival.session == ask.session else now
        owner.rival = Owner(ask.session, now, ask.heartbeat_seconds, ask=ask, since=since)

    def _forget(self, ask: Ask) -> None:
        self._answers.append(Answer(ask))

    def _lapse(self, now: float) -> None:
        """Drop silent owners and rivals."""
        for name, owner in list(self._owners.items()):
            if (rival := owner.rival) and rival.ask and now - rival.heard >= rival.heartbeat_seconds:
                self._forget(rival.ask)
                owner.rival = None
            if now - owner.heard >= owner.heartbeat_seconds:
                self._end(name, owner)

    def _end(self, name: str, owner: Owner) -> None:
        """Remove a name's owner; the session that claims the name becomes the owner."""
        del self._owners[name]
        if name in self.pending:
            self._forget(self.pending.pop(name))
        if (rival := owner.rival) and rival.ask:
            self._owners[name] = replace(rival, ask=None)
            self.pending[name] = rival.ask

    def _needed(self) -> int:
        return min(ask.needed for ask in self.pending.values())

    def _is_due(self, now: float) -> bool:
        """Return whether the pending requests make a view."""
        asking, healthy = len(self.pending), len(self._owners)
        if not asking or asking < self._needed():
            self._enough_since = None
            return False
        running = {name for name, owner in self._owners.items() if owner.runs}
        is_early = now - self._started < 2 * self.heartbeat_seconds / BEATS_PER_TIMEOUT
        if not running & self.pending.keys() and (running or is_early):
            return False
        if self.last is not None and self.last <= self.pending.keys():
            return True
        if 2 * asking <= healthy:
            self._enough_since = None
            return False
        self._enough_since = now if self._enough_since is None else self._enough_since
        gather_seconds = max(ask.gather_seconds for ask in self.pending.values())
        return asking == healthy or now - self._enough_since >= gather_seconds

    def _form(self, now: float) -> Formed | None:
        if not self._is_due(now):
            return None
        names = frozenset(self.pending)
        if names != self.last:
            self._id, self.last = self._id + 1, names
        view = Formed(self._id, tuple(self.pending[name] for name in sorted(names)))
        for ask in view.asks:
            self._owners[ask.name].newest, self._owners[ask.name].view = ask.number, view
        self.pending.clear()
        self._enough_since = None
        return view
