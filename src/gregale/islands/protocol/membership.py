"""The membership of a fleet and its views: the coordinator's rules, without sockets, clocks or threads.

A name has one owner, a session of a process. A name is *healthy* while its owner sent a heartbeat or a request within
`heartbeat_seconds`; after that it has no owner. A tick answers all pending requests with one view in two cases:

- fast: all names of the last view have a pending request;
- slow: at least `minimum` names and more than half of the healthy names have one, and either all healthy names have one
  or the oldest request has waited for `join_seconds`.

| event | rule |
|---|---|
| a view forms | all pending requests are answered; the id increases by one only if the set of names has changed |
| the only name of the last view sends a request | it is answered at once; other requests of that moment are in the view too |
| a healthy name sends no request | the others are answered after `join_seconds`, if they are more than half |
| a session sends another request | the request with the higher number replaces the other, which is dropped |
| a request arrives late or twice | a request with a number that was answered or replaced is dropped |
| a request expires | the request is dropped, and is in no view |
| a process dies | its name is healthy for `heartbeat_seconds`, and its pending request can be in a view until then |
| a process leaves | its name is not healthy any more |
| another session uses a name that has an owner | it waits. If the owner sends a heartbeat, it is refused; if the owner is silent for `heartbeat_seconds`, it becomes the owner |
| the coordinator restarts | it has no members; its first id is one that no member has seen (`first_id`) |
"""  # noqa: E501

import math
from dataclasses import dataclass, replace
from typing import Any

BEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, eq=False, slots=True)
class Ask:
    """A member's request for a view."""

    name: str
    session: str
    number: int  # increases with the requests of one session
    header: Any  # this member's header, for all members of the view
    until: float = math.inf  # the time at which the member stops waiting


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
    newest: int = -1  # number of its newest request that was answered or replaced
    ask: Ask | None = None
    since: float = 0.0
    rival: "Owner | None" = None


class Membership:
    """The state of a coordinator. Times are seconds of one clock; ticks may be any time apart."""

    def __init__(self, minimum: int, join_seconds: float, heartbeat_seconds: float, first_id: int = 1):
        self._minimum, self._join_seconds, self._heartbeat_seconds = minimum, join_seconds, heartbeat_seconds
        self._id = first_id - 1
        self._owners: dict[str, Owner] = {}
        self._answers: list[Answer] = []
        self.pending: dict[str, tuple[float, Ask]] = {}  # by name, with the time of arrival, the oldest first
        self.last: frozenset[str] | None = None

    @property
    def healthy(self) -> dict[str, str]:
        """Sessions by name, as of the last tick."""
        return {name: owner.session for name, owner in self._owners.items()}

    def beat(self, name: str, session: str, now: float) -> None:
        owner = self._heard(name, session, now)
        rival = owner.rival
        if owner.session == session and rival and now - rival.since >= self._heartbeat_seconds / BEATS_PER_TIMEOUT:
            owner.rival = None
            assert rival.ask is not None
            self._answers.append(Answer(rival.ask, refused=f"another island of the fleet has the name {name!r}"))

    def ask(self, ask: Ask, now: float) -> None:
        """Record a member's request; a later tick answers it."""
        owner = self._heard(ask.name, ask.session, now)
        if owner.session != ask.session:
            self._claim(owner, ask, now)
            return
        _, pending = self.pending.get(ask.name, (now, None))
        if ask.number <= owner.newest or (pending and ask.number < pending.number):
            self._forget(ask)
            return
        if pending:
            self._forget(self.pending.pop(ask.name)[1])
        self.pending[ask.name] = now, ask

    def leave(self, name: str, session: str) -> None:
        """Record the end of a process; a session that claims its name becomes the owner."""
        owner = self._owners.get(name)
        if owner and owner.session == session:
            self._end(name, owner)
        elif owner and owner.rival and owner.rival.session == session:
            owner.rival = None

    def tick(self, now: float) -> list[Answer]:
        """Return the answers that are due."""
        self._lapse(now)
        view = self._form(now)
        answers, self._answers = self._answers, []
        return answers + ([Answer(ask, view) for ask in view.asks] if view else [])

    def _heard(self, name: str, session: str, now: float) -> Owner:
        """Update the time of the last heartbeat; return the name's owner, this session if there was none."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(session, now)
        for each in (owner, owner.rival):
            if each and each.session == session:
                each.heard = max(each.heard, now)
        return owner

    def _claim(self, owner: Owner, ask: Ask, now: float) -> None:
        since = now
        if (rival := owner.rival) and rival.ask:
            self._forget(rival.ask)
            since = rival.since if rival.session == ask.session else now
        owner.rival = Owner(ask.session, now, ask=ask, since=since)

    def _forget(self, ask: Ask) -> None:
        self._answers.append(Answer(ask))

    def _lapse(self, now: float) -> None:
        """Drop expired requests and silent owners."""
        for name, (_, ask) in list(self.pending.items()):
            if now >= ask.until:
                del self.pending[name]
                self._forget(ask)
        for name, owner in list(self._owners.items()):
            if owner.rival and owner.rival.ask and now >= owner.rival.ask.until:
                self._forget(owner.rival.ask)
                owner.rival = None
            while (silent := self._owners.get(name)) and now - silent.heard >= self._heartbeat_seconds:
                self._end(name, silent)

    def _end(self, name: str, owner: Owner) -> None:
        """Remove a name's owner; the session that claims the name becomes the owner."""
        del self._owners[name]
        if name in self.pending:
            self._forget(self.pending.pop(name)[1])
        if (rival := owner.rival) and rival.ask:
            self._owners[name] = replace(rival, ask=None)
            self.pending[name] = rival.since, rival.ask
            self.pending = dict(sorted(self.pending.items(), key=lambda item: item[1][0]))

    def _form(self, now: float) -> Formed | None:
        if not self.pending:
            return None
        if self.last is None or not self.last <= self.pending.keys():
            asking, healthy = len(self.pending), len(self._owners)
            oldest, _ = next(iter(self.pending.values()))
            if asking < self._minimum or 2 * asking <= healthy:
                return None
            if asking < healthy and now - oldest < self._join_seconds:
                return None
        names = frozenset(self.pending)
        if names != self.last:
            self._id, self.last = self._id + 1, names
        asks = tuple(self.pending[name][1] for name in sorted(names))
        for ask in asks:
            self._owners[ask.name].newest = ask.number
        self.pending.clear()
        return Formed(self._id, asks)
