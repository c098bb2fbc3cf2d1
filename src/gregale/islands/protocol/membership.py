"""The membership of a fleet and its views: the coordinator's rules, without sockets, clocks or threads.

A name belongs to a session of a process, the oldest that is *healthy*: it sent a heartbeat or a request within its
`heartbeat_seconds`. Others of the name wait, and are refused once the owner sends another heartbeat after that time and
the interval between two heartbeats.

A request is held until a view answers it, a request with a higher number replaces it, or its session is silent or
leaves. A request that has ended is in no later view, because its header may be outdated. If it is repeated, it gets its
view again, and is dropped if its session was silent in between. Every view has all pending requests. A tick forms a
view if at least `needed` names have a request, in two cases:

- fast: all names of the last view have one;
- slow: more than half of the healthy names have one, and either all healthy names have one or that was so for
  `gather_seconds`.

A coordinator records one last state of a run, the first that an island tells: its own, or that of another coordinator.
From then on it forms no view of that run without a name that has this state, or the one that most have recorded. So
islands that were silent, or that come later, do not continue or begin the run alone.

A name *runs* if it has reported a round. A view without such a name may begin a fleet, so it is not formed while there
is one, nor before the names that run had the time for a heartbeat since the coordinator's start.

The islands give these numbers with their requests: the smallest `needed`, and the largest `gather_seconds`. The
coordinator has none of its own. The id of a view increases by one only if the set of names has changed. The first id
(`first_id`) is one that no member has seen, so that a restarted coordinator repeats none.

Where there are several coordinators, each view belongs to a term of its coordinator, and has requests of this term
only. No two coordinators have the same term (`choice`).
"""

import math
from dataclasses import dataclass
from typing import Any

from gregale.formatting import listed
from gregale.islands.protocol.messages import NO_ROUND

BEATS_PER_TIMEOUT = 5
MOST_RUNS = 1000  # complete ones that a coordinator remembers
NEVER = 10**6  # needed members of those that only join a fleet: it begins at the first coordinator of several
TERMS, VIEWS = 2**48, 2**32  # more than coordinators draw first ids from, and than there are views of one
Record = tuple[int, str]  # of a complete run: the number of its rounds, and the digest of its last state


@dataclass(frozen=True, eq=False, slots=True)
class Ask:
    name: str
    session: str
    number: int  # increases with the requests of one session
    header: Any  # this member's header, for all members of the view
    needed: int  # the smallest number of members in a view that are of use to this one
    gather_seconds: float
    heartbeat_seconds: float
    term: int = 0  # the coordinator's, as far as the member knows; 0: there is one coordinator
    round: int = NO_ROUND  # of the member's state
    run: str = ""  # the same text for all members of a run
    state: str = ""  # the digest of the member's state
    recorded: str = ""  # that of the last state which most coordinators have recorded, if the member knows it


@dataclass(frozen=True, slots=True)
class Formed:
    """A view: an id that counts changes of membership, its requests sorted by name, and a stamp that counts views."""

    id: int
    asks: tuple[Ask, ...]
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request: a view, a refusal, or neither if the request is dropped."""

    ask: Ask
    view: Formed | None = None
    refused: str = ""


@dataclass(slots=True)
class Session:
    """A process that the coordinator hears. The oldest of a name owns it."""

    key: str  # the session that the process has drawn
    since: float
    heard: float
    heartbeat_seconds: float
    round: int = NO_ROUND  # the newest that it has reported
    here: bool = True  # it sends its requests to this coordinator
    met: bool = False  # it receives the answers to its heartbeats
    differs: bool = False  # by its newest request, it has not the last state that most coordinators have recorded
    ask: Ask | None = None  # its pending request
    header: Any = None  # of its newest request
    view: Formed | None = None  # of its newest request, once a view has answered it

    @property
    def runs(self) -> bool:
        return self.round > NO_ROUND


class Membership:
    """The state of a coordinator. Times are seconds of one clock; ticks may be any time apart.

    - `complete`: the last states of complete runs; it outlives this process
    """

    def __init__(self, first_id: int = 1, complete: dict[str, Record] | None = None):
        self._id, self._views = first_id - 1, 0
        self._key = self.term = first_id % TERMS
        self._sessions: dict[str, dict[str, Session]] = {}  # by name, then by session, the oldest first
        self._owners: dict[str, Session] = {}  # the first ones, by name
        self._newest: dict[tuple[str, str], int] = {}  # numbers of requests, by name and session; kept for ever
        self._answers: list[Answer] = []
        self._enough_since: float | None = None  # when more than half of the names had a request for a view
        self._started, self._stopped = math.inf, 0.0  # when it began to listen; `stopped` of the last tick
        self.last: frozenset[str] | None = None
        self._awaited = ""
        self.complete = {} if complete is None else complete

    @property
    def healthy(self) -> dict[str, str]:
        """Sessions by name, as of the last tick."""
        return {name: owner.key for name, owner in self._owners.items()}

    @property
    def pending(self) -> dict[str, Ask]:
        return {name: owner.ask for name, owner in self._owners.items() if owner.ask}

    @property
    def running(self) -> list[Any]:
        """The newest headers of the names that run, as of the last tick."""
        return [each.header for each in self._owners.values() if each.runs and each.header is not None]

    @property
    def has_answers(self) -> bool:
        """Whether the next tick returns answers without waiting for anything."""
        return bool(self._answers)

    @property
    def heartbeat_seconds(self) -> float:
        """The longest silence of a healthy name."""
        return max((owner.heartbeat_seconds for owner in self._owners.values()), default=0.0)

    @property
    def hears(self) -> int:
        """The number of healthy names that this coordinator hears, and that hear it."""
        return sum(owner.met for owner in self._owners.values())

    @property
    def newest(self) -> int:
        """The newest round that a healthy name has reported."""
        return max((owner.round for owner in self._owners.values()), default=NO_ROUND)

    @property
    def behind(self) -> int:
        """The number of healthy names that have reported an older round, or have another last state."""
        newest = self.newest
        return sum(owner.round < newest or owner.differs for owner in self._owners.values())

    def held(self, name: str) -> str:
        """Return what the next view waits for, as of the last tick, and what `name` has to know beside it.

        That is whether there is no request of `name`, and which members of the last view, if it was not one of them,
        may be in a reduce that does not end: what keeps them is one of themselves.
        """
        owner, last = self._owners.get(name), self.last or frozenset()
        own = "" if owner and owner.ask else "the coordinator had no request of this island at its last answer; "
        is_beside = name not in last and bool(last & self._owners.keys() - self.pending.keys())
        return f"{own}{self._awaited}{f'; the last view has {listed(sorted(last))}' if is_beside else ''}"

    def _what_is_awaited(self, now: float) -> str:
        pending, reasons = self.pending, []
        others = sorted(self._here() - pending.keys())
        if pending and (needed := _needed(pending)) == NEVER:
            reasons.append("a fleet begins at the first coordinator only, which is silent here")
        elif pending and len(pending) < needed:
            reasons.append(f"{len(pending)} of at least {needed} islands are here ({listed(sorted(pending))})")
        if others:
            reasons.append(f"the coordinator waits for the requests of {listed(others)}")
        if pending and self._enough_since is not None:
            seconds = self._enough_since + _gather_seconds(pending) - now
            reasons[-1] += f", at most {max(seconds, 0.0):.1f} s more"
        if pending and (seconds := self._early_seconds(pending, now)):
            reasons.append(f"the coordinator waits {seconds:.1f} s more for heartbeats of a fleet that runs")
        if pending and (rounds := self._is_left_behind(pending)):
            reasons.append(
                f"the run is complete with {rounds} rounds, and the islands with its last parameters have ended: start "
                "one of them again, which hands them over (to train the run anew, end all islands and lighthouses, and "
                "delete TOKEN_FILE.complete beside each lighthouse's token_file)"
            )
        return "; ".join(reasons) or "the coordinator forms a view"

    def beat(
        self, name: str, session: str, heartbeat_seconds: float, round: int, now: float, here: bool = True,
        met: bool = True,
    ) -> None:  # fmt: skip
        """Record a heartbeat, with the newest round; that of an owner refuses other processes of its name."""
        found = self._heard(name, session, heartbeat_seconds, now)
        found.round, found.here, found.met = round, here, met
        if not here:
            self._drop_ask(found)
            found.ask = None
        owner, *rivals = self._sessions[name].values()
        for rival in rivals if owner.key == session else ():
            # Earlier heartbeats of the owner may have been sent before the other process began.
            if rival.ask and now - rival.since >= (waited := heartbeat_seconds * (1 + 1 / BEATS_PER_TIMEOUT)):
                del self._sessions[name][rival.key]
                lives = f"another process has the name {name!r} and has sent heartbeats for {waited:g} s since"
                self._answers.append(Answer(rival.ask, refused=lives))

    def ask(self, ask: Ask, now: float) -> None:
        session = self._heard(ask.name, ask.session, ask.heartbeat_seconds, now)
        if ask.term and ask.term != self.term:
            if ask.term > self.term:
                self._begin_term(ask.term)
            self._answers.append(Answer(ask))
            return
        session.here, key = True, (ask.name, ask.session)
        session.differs = ask.recorded not in ("", ask.state)
        newest = self._newest.get(key, -1)
        if ask.number > newest or (session.ask and ask.number == newest):
            self._drop_ask(session)
            session.ask, session.header, self._newest[key] = ask, ask.header, ask.number
        else:  # the newest one gets its view again: the member has not received it
            self._answers.append(Answer(ask, session.view if ask.number == newest else None))

    def _begin_term(self, after: int) -> None:
        """Begin a term after another coordinator's: the requests of an earlier term are in no view."""
        self.term = (after // TERMS + 1) * TERMS + self._key
        self._id, self.last, self._enough_since = self.term * VIEWS, None, None
        for session in (each for processes in self._sessions.values() for each in processes.values()):
            self._drop_ask(session)
            session.ask = session.view = None

    def _here(self) -> set[str]:
        return {name for name, owner in self._owners.items() if owner.here}

    def record(self, run: str, last: Record) -> bool:
        """Record the last state of a run, unless it has one; return whether this is new."""
        is_new = run not in self.complete
        self.complete.setdefault(run, last)
        for oldest in list(self.complete)[:-MOST_RUNS]:
            del self.complete[oldest]
        return is_new

    def leave(self, name: str, session: str) -> None:
        """Record the end of a process. The next oldest of the name becomes the owner."""
        processes = self._sessions.get(name, {})
        if found := processes.pop(session, None):
            self._drop_ask(found)
            del self._sessions[name], self._owners[name]
            if processes:
                self._sessions[name], self._owners[name] = processes, next(iter(processes.values()))

    def tick(self, now: float, stopped: float = 0.0) -> list[Answer]:
        """Return the answers that are due.

        - `stopped`: see `RunningTime`; heartbeats sent while this process was stopped may not have been read yet
        """
        self._started = now if stopped > self._stopped else min(self._started, now)
        self._stopped = stopped
        every = [(name, each) for name, processes in self._sessions.items() for each in processes.values()]
        for name, session in every:
            if now - session.heard >= session.heartbeat_seconds:
                self.leave(name, session.key)
        view = self._form(now)
        self._awaited = self._what_is_awaited(now)
        answers, self._answers = self._answers, []
        return answers + ([Answer(ask, view) for ask in view.asks] if view else [])

    def _heard(self, name: str, session: str, heartbeat_seconds: float, now: float) -> Session:
        processes = self._sessions.setdefault(name, {})
        found = processes.setdefault(session, Session(session, now, now, heartbeat_seconds))
        self._owners.setdefault(name, found)
        found.heard = max(found.heard, now)
        return found

    def _drop_ask(self, session: Session) -> None:
        if session.ask:
            self._answers.append(Answer(session.ask))

    def _is_due(self, pending: dict[str, Ask], now: float) -> bool:
        running = {name for name, owner in self._owners.items() if owner.runs}
        is_beside = bool(running) and not running & pending.keys()  # it may begin a fleet beside one that runs
        is_early = self._early_seconds(pending, now) > 0
        possible = len(pending) >= _needed(pending) and not is_beside and not is_early
        possible = possible and not self._is_left_behind(pending)
        if possible and self.last is not None and self.last <= pending.keys():
            return True
        if not possible or 2 * len(pending) <= (count := len(self._here())):
            self._enough_since = None
            return False
        self._enough_since = now if self._enough_since is None else self._enough_since
        return len(pending) == count or now - self._enough_since >= _gather_seconds(pending)

    def _is_left_behind(self, pending: dict[str, Ask]) -> int:
        """Return the number of rounds of a complete run, if none of these requests has its last state; else 0."""
        run = max(pending.values(), key=lambda ask: ask.round).run
        rounds, state = self.complete.get(run, (0, ""))
        state = next((ask.recorded for ask in pending.values() if ask.recorded and ask.run == run), state)
        return 0 if any((ask.run, ask.state) == (run, state) for ask in pending.values()) else rounds

    def _early_seconds(self, pending: dict[str, Ask], now: float) -> float:
        """Return for how long these requests may not begin a fleet: one that runs may not have sent a heartbeat yet."""
        if any(self._owners[name].runs for name in pending):
            return 0.0
        return max(self._started + 2 * self.heartbeat_seconds / BEATS_PER_TIMEOUT - now, 0.0)

    def _form(self, now: float) -> Formed | None:
        pending = self.pending
        if not pending or not self._is_due(pending, now):
            return None
        names, self._enough_since = frozenset(pending), None
        if names != self.last:
            self._id, self.last = self._id + 1, names
        self._views += 1
        view = Formed(self._id, tuple(pending[name] for name in sorted(names)), self.term * VIEWS + self._views)
        for ask in view.asks:
            owner = self._owners[ask.name]
            owner.view, owner.ask = view, None
        return view


def _needed(pending: dict[str, Ask]) -> int:
    return min(ask.needed for ask in pending.values())


def _gather_seconds(pending: dict[str, Ask]) -> float:
    return max(ask.gather_seconds for ask in pending.values())
