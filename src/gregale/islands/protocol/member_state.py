"""Where a member of the protocol stands: its state, and what it tells of it. `member.Member` has what happens to it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gregale.islands.protocol import decision as decisions
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.handover import Handover
from gregale.islands.protocol.headers import NO_ROUND, AcceptedResult, Header, OuterRecord, Peer
from gregale.islands.protocol.plans import Decision, FormGroup, Plan, Wait
from gregale.islands.protocol.settings import Rules, Timing

MOST_DOUBLINGS = 3  # of the pause of a member whose reduces fail: 8 times `turnover_seconds`


@dataclass(frozen=True)
class Identity:
    """Who an island is: name, session (random at every start), what it must share with others, its hosts' addresses.

    - `batch`: examples of a batch
    """

    name: str
    session: str
    agreement: str
    version: str
    hosts: tuple[str, ...]
    batch: int = 1


@dataclass(frozen=True)
class PendingCommit:
    """A result that is held: what others are told, the outer state that it makes, what this island put in."""

    held: AcceptedResult
    outer: OuterRecord
    weight: float
    last: bool  # this member leaves with it
    form: FormGroup  # of the group that made it


class MemberState:
    """The state of a member; `member.Member` documents it."""

    def __init__(
        self,
        identity: Identity,
        outer: OuterRecord,
        timing: Timing,
        rules: Rules,
        holder: str = "",
        used: int = 0,
    ):
        self.identity, self.timing, self.rules, self.outer = identity, timing, rules, outer
        self.holder = holder or identity.session
        self._now = 0.0
        self._actions: list[m.Action] = []
        self._voter = False
        self._asked, self._waiting_for = 0, False  # number of the newest ask; whether its answer is awaited
        self._seen, self._retry_at = 0, 0.0
        self._waiting_since: float | None = None
        self._group: tuple[Peer, ...] = ()  # who made the newest round with this member, if it did
        self._missing: frozenset[str] = frozenset()  # those of them that are waited for
        self._gone: frozenset[str] = frozenset()  # dead
        self._asks: dict[str, int] = {}  # number of the newest one that it saw of each, by identity
        self._peers: tuple[str, ...] = ()
        self._slowest = 0.0
        self._attentive = True  # has to see a view, whether or not a round is due
        self._healing = False
        self._heard_at, self._unheard = math.nan, ""  # the newest view; why the newest ask had none
        self._plan: tuple[Plan | None, tuple[str, ...]] = (None, ())  # of the newest view, and who is waited for
        self._sources: tuple[Peer, ...] = ()  # of the state that is fetched
        self._heal_failed = ""
        self._left_out: dict[
            str, int
        ] = {}  # rounds in a row to which islands have contributed nothing, as they diverge
        self._in_vain, self._healing_since = 0, 0.0  # heals in a row after which it was behind again
        self._shut_out, self._paused_until = 0, 0.0  # times in a row that the others went on because its reduces failed
        self._awaited_before = 0.0  # seconds for which rounds waited for heals before this one
        self._used, self._step_seconds = used, 0.0
        self._leave_by: float | None = None
        self._done = False
        self.handover = Handover()
        self._fresh = outer.round > NO_ROUND
        self._forget_round()

    def _forget_round(self) -> None:
        self._ping_at, self._grace_end = 0.0, 0.0
        self.handover.forget()
        self._reducing: tuple[FormGroup, float] | None = None
        self._held: PendingCommit | None = None
        self._ballot, self._failures = 0, 0
        self._unreachable: tuple[str, ...] = ()
        self._lacked = False  # a view of this round lacked voters, who may only have been late

    @property
    def _me(self) -> str:
        return f"{self.identity.name}/{self.identity.session}"

    @property
    def header(self) -> Header:
        """What this member would tell now."""
        who, outer, shot = self.identity, self.outer, self.handover.snapshot
        return Header(
            name=who.name,
            session=who.session,
            asked=self._asked,
            agreement=who.agreement,
            version=who.version,
            hosts=who.hosts,
            batch=who.batch,
            round=outer.round,
            generation=outer.generation,
            digest=outer.fingerprint(),
            last=outer.last,
            voter=self._voter,
            voters=outer.voters,
            ballot=self._ballot,
            held=self._held.held if self._held else None,
            failures=self._failures,
            unreachable=self._unreachable,
            ready=shot is not None,
            weight=shot.weight if shot else 0.0,
            norm=shot.norm if shot else 0.0,
            usual=outer.usual(),
            starved=self.handover.weighs_nothing and self.handover.starved,
            seen=self._seen,
            healing=self._healing,
            hold_rounds=self._awaited(),
            wait_expired=self._waited(),
            from_checkpoint=self._fresh,
            retried=self._lacked and self._now >= self._grace_end,
            leaving=shot is not None and shot.final,
            holder=self.holder,
            used=self._used,
            step_seconds=self._step_seconds,
        )

    def _pause_if_shut_out(self) -> None:
        """The others go on without this member, whose reduces failed: it joins them again after a time that doubles."""
        if self._failures >= decisions.STUBBORN:
            self._paused_until = self._now + self.timing.turnover_seconds * 2 ** min(self._shut_out, MOST_DOUBLINGS)
            self._shut_out += 1

    def _pauses(self, decision: Decision) -> bool:
        """Whether this member keeps out of the others' rounds, which go on; it does not if they wait for somebody."""
        waits = isinstance(decision.plan, Wait) and not decision.plan.idle
        return self._now < self._paused_until and not waits

    def _waited(self) -> bool:
        """Whether there is no use in waiting any more for who made the last round."""
        if self._waiting_since is None:
            return False
        dead = bool(self._missing) and self._missing <= self._gone
        return dead or self._now - self._waiting_since >= self.timing.turnover_seconds

    def _awaited(self) -> bool:
        """Whether rounds shall wait for this healing: after 1, 2, 4, 8, ... in vain, for a bounded time in all."""
        return self._healing and self._in_vain_enough() and self._time_awaited() < self.timing.turnover_seconds

    def _in_vain_enough(self) -> bool:
        return self._in_vain > 0 and self._in_vain & (self._in_vain - 1) == 0

    def _time_awaited(self) -> float:
        """Seconds for which rounds have waited since this member was last where the others are, failed tries too."""
        now = self._now - self._healing_since if self._healing and self._in_vain_enough() else 0.0
        return self._awaited_before + now

    @property
    def done(self) -> bool:
        """Whether it has left or was refused."""
        return self._done

    @property
    def leaving(self) -> bool:
        """Whether it was told to leave: the next snapshot may be the final one."""
        return self._leave_by is not None

    def _left_out_lines(self, form: FormGroup) -> list[str]:
        """What is said of the messages that are left out: of an island that goes on so the 1st, 2nd, 4th, ... time."""
        contributed = {peer.name for peer, weight in zip(form.members, form.weights, strict=True) if weight}
        self._left_out = {name: times for name, times in self._left_out.items() if name not in contributed}
        lines = []
        for name, reason in form.left_out.items():
            times = self._left_out[name] = 1 + self._left_out.get(name, 0)
            if times & (times - 1) == 0:
                again = f" (the {times}th time)" if times > 2 else ""
                round = self.outer.round
                lines.append(f"round {round}: the message of island {name} {reason}; it contributes nothing{again}")
        return lines

    def _note_plan(self, decision: Decision) -> None:
        plan = decision.plan
        waits_for_voters = isinstance(plan, Wait) and (plan.missing or plan.lacking)
        who = tuple(peer.name for peer in decision.missing(self._group)) if waits_for_voters else ()
        self._plan = plan, who or (plan.who if isinstance(plan, Wait) else ())

    def _note_asks(self, decision: Decision) -> bool:
        """Returns whether an ask was in an earlier view too: it may no longer be true, so the view means nothing."""
        asks = {who: header.asked for who, header in decision.headers.items()}
        repeated = any(self._asks.get(who, 0) >= number for who, number in asks.items())
        self._asks |= {who: max(number, self._asks.get(who, 0)) for who, number in asks.items()}
        return repeated

    def why(self) -> str:
        """Why no round is committed, and who is waited for; empty if nothing but this island's own steps is."""
        number, since = self.outer.round, self._now - self._heard_at
        if self._reducing:
            names = [peer.name for peer in self._reducing[0].members]
            return f"round {number} is being reduced by {_listed(names)}{self._tries()}"
        if self._healing:
            failed = f"; the last try failed: {self._heal_failed}" if self._heal_failed else ""
            seconds = self._now - self._healing_since
            return (
                f"this island fetches the state of {_listed(p.name for p in self._sources)} for {seconds:.0f} s{failed}"
            )
        if self._unheard:
            return f"the coordinator has not answered for {since:.0f} s ({self._unheard})"
        plan, who = self._plan
        if isinstance(plan, Wait):
            return f"{plan.reason}{f' ({_listed(who)})' if who else ''}{self._tries()}"
        if self._waiting_for:
            made = f" (the last round was made by {_listed(p.name for p in self._group)})" if self._group else ""
            return f"the coordinator waits for other islands to ask, for {since:.0f} s now{made}"
        if self._held:
            return f"the result of round {number} is not held by more than half of its islands yet{self._tries()}"
        if self.handover.wanted:
            return f"this island is in the middle of a step (the last took {self._step_seconds:.1f} s)"
        return ""

    def _tries(self) -> str:
        silent = f", {_listed(self._unreachable)} did not answer" if self._unreachable else ""
        tries = "1 try" if self._failures == 1 else f"{self._failures} tries"
        return f"; {tries} failed{silent}" if self._failures else ""

    def next_tick(self) -> float:
        """When the next `Tick` is needed, if nothing else happens before."""
        times = [math.inf if self._leave_by is None else self._leave_by]
        if self._reducing:
            times.append(self._reducing[1])
        else:
            if self.handover.own:
                times.append(self._ping_at)
            if not self._waiting_for and (self.handover.due or self._held or self._attentive):
                times.append(max(self._retry_at, 0.0 if self.handover.snapshot else self._grace_end))
        return max(self._now, min(times))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
