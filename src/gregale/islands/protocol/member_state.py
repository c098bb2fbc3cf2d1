"""The state of a member of the protocol, and the header made from it. `member.Member` handles the events."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gregale.islands.protocol import decision as decisions
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.choice import SILENT_BEATS
from gregale.islands.protocol.decision import Decision, FormGroup, Plan, Wait
from gregale.islands.protocol.handover import Handover
from gregale.islands.protocol.ledger import digest_of
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT
from gregale.islands.protocol.messages import NO_ROUND, AcceptedResult, Header, OuterRecord, Peer, Rules, Timing
from gregale.islands.protocol.outliers import median

EQUAL_STEPS = 1.1  # times the shortest step: the steps of islands that count as equally fast
GRACE_STEPS = 1.5  # of the fastest member: others between two of their steps hand their messages over in time
ABSENT_ROUNDS = 3  # without a member's contribution, after which that is reported
MOST_LINGERS = 10  # times `linger_seconds`, for which a complete island hands its state over
MAX_DOUBLINGS = 3  # of the pause of a member whose reduces fail: at most 8 times `turnover_seconds`


@dataclass(frozen=True)
class Identity:
    """An island's name, session (random at every start), agreement with the others, and hosts' addresses."""

    name: str
    session: str
    agreement: str
    version: str
    hosts: tuple[str, ...]
    batches: tuple[int, ...] = (1,)  # examples of a batch, in each stage


@dataclass(frozen=True)
class PendingCommit:
    """A held result: its header entry, the resulting outer state, and this island's contribution."""

    held: AcceptedResult
    outer: OuterRecord
    weight: float
    last: bool  # this member leaves after this round
    form: FormGroup  # the plan that led to it


class MemberState:
    def __init__(
        self, identity: Identity, outer: OuterRecord, timing: Timing, rules: Rules, holder: str = "", used: int = 0
    ):
        self.identity, self.timing, self.rules, self.outer = identity, timing, rules, outer
        self.holder = holder or identity.session
        self._now = 0.0
        self._actions: list[m.Action] = []
        self._voter = False
        self._asked, self._waiting_for = 0, False  # number of the newest request; whether its answer is pending
        self._seen, self._retry_at = 0, 0.0
        self._waiting_since: float | None = None
        self._group: tuple[Peer, ...] = ()  # members of the newest round, if this member took part
        self._electors: tuple[str, ...] = ()  # identities of the voters, if they are known
        self._committed: PendingCommit | None = None  # the newest result
        self._missing: frozenset[str] = frozenset()  # members of that group that are missing
        self._dead: frozenset[str] = frozenset()  # identities of dead peers
        self._asks: dict[str, int] = {}  # the newest request number seen, by identity
        self._peers: tuple[str, ...] = ()  # addresses in the newest view
        self._pings = 0  # announcements so far
        self._link = 0  # level of the link's rate, at the newest message
        self._fastest = 0.0  # the shortest step in the newest view
        self._needs_view = True  # must see a view, whether or not a round is due
        self._healing = False
        self._heard_at, self._error = math.nan, ""  # when the coordinator answered; why it did not answer since
        self._changed_at = 0.0  # the end of its last silence, or of the first failed try of a round
        self._held_request = ""  # what the coordinator waits for, by its last answer since the newest view
        self._plan: tuple[Plan | None, tuple[str, ...]] = (None, ())  # of the newest view, with the names it waits for
        self._sources: tuple[Peer, ...] = ()  # of the fetched state
        self._wanted: Header | None = None  # the header of the state that it fetches or has fetched
        self._heal_failed = ""
        self._left_out: dict[
            str, int
        ] = {}  # rounds in a row to which islands have contributed nothing, as they diverge
        self._contributed: dict[str, tuple[int, float]] = {}  # the newest round of each name, and when it was committed
        self._told_at: dict[str, float] = {}  # when the next line about a name is due that contributes nothing
        self._headers: Mapping[str, Header] = {}  # of the newest view, by identity
        self._vain_heals, self._healing_since = 0, 0.0  # consecutive heals after which it was behind again
        self._times_excluded, self._paused_until = 0, 0.0  # consecutive rounds that the others made without this member
        self._hold_time_before = 0.0  # seconds for which rounds waited for earlier heals
        self._used = used
        self._leave_by: float | None = None
        self._complete_at: float | None = None  # when it became complete
        self._end_by = math.inf  # when it ends then, whoever is behind
        self._newest, self._behind = NO_ROUND, 0  # as of the newest heartbeat
        self._recorded = ""  # the digest of the run's last state, once most coordinators have recorded it
        self.saved: tuple[int, str] | None = None  # rounds and digest of the own last state, for them to record
        self._done = False
        self.handover = Handover()
        self.handover.fragments = rules.fragments_at(outer.round)
        self._from_checkpoint = outer.round > NO_ROUND
        self._forget_round()

    def _forget_round(self) -> None:
        self._ping_at, self._grace_end = 0.0, 0.0
        self._reducing: tuple[FormGroup, float] | None = None
        self._held: PendingCommit | None = None
        # What it holds in place of `_held`, without data; the record that follows, if it has the same data as now.
        self._accepted: tuple[AcceptedResult, OuterRecord | None] | None = None
        self._ballot, self._failures = 0, 0
        self._contributes = False  # a reduce of this round has begun with this member's message
        self._silent: list[tuple[str, ...]] = []  # who did not answer, in each failed reduce
        self._unreachable: tuple[str, ...] = ()
        self._lacked = False  # a view of this round lacked voters, which may only have been late

    @property
    def _me(self) -> str:
        return f"{self.identity.name}/{self.identity.session}"

    @property
    def _message(self) -> m.MessageReady | None:
        """The message for the current round, if it is available."""
        return self.handover.snapshot if self.handover.serves(self.outer.round) else None

    @property
    def header(self) -> Header:
        own, outer, message = self.identity, self.outer, self._message
        held = self._accepted[0] if self._accepted else self._held.held if self._held else None
        is_strict = self.rules.majority
        return Header(
            name=own.name,
            session=own.session,
            asked=self._asked,
            agreement=own.agreement,
            version=own.version,
            hosts=own.hosts,
            batch=own.batches[self.rules.stage_at(outer.round + 1)],  # for leases of the round to come
            round=outer.round,
            generation=outer.generation,
            digest=outer.fingerprint(),
            last=outer.last,
            voter=self._voter,
            voters=outer.voters,
            ballot=self._ballot,
            held=held,
            failures=self._failures,
            unreachable=self._unreachable,
            ready=message is not None or self._is_too_late,
            weight=message.weight if message else 0.0,
            norm=message.norm if message else 0.0,
            usual=median(outer.sizes),
            starved=self.handover.weighs_nothing and self.handover.starved,
            seen=self._seen,
            healing=self._healing,
            hold_rounds=self._holds_rounds(),
            wait_expired=self._is_wait_expired(),
            from_checkpoint=self._from_checkpoint,
            retried=self._lacked and (self._is_closing or self._now >= self._grace_end),
            leaving=message is not None and message.final,
            holder=self.holder,
            used=self._used,
            step_seconds=self.handover.step_seconds,
            link=self._link,
            recorded=self._recorded,
            electors=self._electors if is_strict else (),
            prepared=is_strict and (self._accepted[1] if self._accepted else self._held) is not None,
            dead=tuple(sorted(self._dead.intersection(self._electors))) if is_strict else (),
            known=tuple(lease.name for lease in outer.ledger.leases) if is_strict else (),
        )

    def _count(self, message: m.MessageReady) -> None:
        """Note the examples of a message; an earlier stage has counted other examples."""
        if self.rules.stage_at(message.round) == self.rules.stage_at(self.outer.round):
            self._used = max(self._used, message.used)

    def _adopt(self, outer: OuterRecord) -> None:
        """Continue with another outer state; in another stage, count the used examples from 0."""
        if self.rules.stage_at(outer.round) != self.rules.stage_at(self.outer.round):
            self._used, self.handover.fragments = 0, self.rules.fragments_at(outer.round)
            self.handover.state_replaced()
        self.outer = outer

    @property
    def is_complete(self) -> bool:
        """Whether this island has the outer state of the last round."""
        return self.outer.round >= self.rules.rounds

    @property
    def may_end(self) -> bool:
        """Whether a complete island may end: its state is of no use to others any more, or they do not fetch it.

        It waits until all islands that the coordinator hears are complete, for a bounded time.
        """
        silent = self._error and self._now - self._heard_at > self.timing.heartbeat_seconds
        known = self._newest >= self.rules.rounds and not self._behind
        return self.is_complete and not self.differs and (known or bool(silent) or self._now >= self._end_by)

    @property
    def differs(self) -> bool:
        """Whether the last state is another one than the recorded one, which an island has to hand over."""
        return self.is_complete and self._recorded not in ("", self.outer.fingerprint())

    @property
    def verdict(self) -> bool | None:
        """Whether the saved state is the run's last one; None: most coordinators have recorded none so far.

        False also if they have not for so long that this island ends nevertheless.
        """
        if self.saved and self._recorded:
            return self.saved[1] == self._recorded
        return False if self.saved and self._now >= self._end_by else None

    @property
    def _is_closing(self) -> bool:
        return self.rules.closing <= self.outer.round < self.rules.rounds

    @property
    def _is_too_late(self) -> bool:
        """Whether a closing round is decided without this member's message."""
        return self._is_closing and self.handover.due and not self.rules.lockstep and self._now >= self._grace_end

    def _grace(self) -> float:
        """Return the seconds for which a round waits for this member's step and for the copy of its message."""
        grace, timing = self.timing.grace_seconds, self.timing
        if self._is_closing:
            grace = max(GRACE_STEPS * self.handover.step_seconds, timing.leave_seconds)
        elif grace is None and self._fastest:
            grace = min(GRACE_STEPS * self._fastest, timing.max_grace_seconds)
        elif grace is None:  # the first round: the others' steps are not known yet, and they wait no longer
            grace = min(GRACE_STEPS * self.handover.step_seconds, timing.join_seconds)
        return grace + 2 * self.handover.copy_seconds

    def _is_slow(self) -> bool:
        """Return whether this member's steps are too long for the others to wait for one."""
        # Where rounds follow one another in few steps, even a short wait makes them fewer.
        most = min(GRACE_STEPS * self._fastest, self.handover.interval_seconds / 2)
        return not self.rules.lockstep and 0 < max(EQUAL_STEPS * self._fastest, most) < self.handover.step_seconds

    def _needed(self) -> int:
        """Return the smallest number of members of a view that is of use to this member."""
        if self.is_complete:
            return 1
        return max(self.rules.minimum, self.rules.start if self._from_checkpoint or self.outer.round == NO_ROUND else 1)

    def _some_pause(self) -> float:
        """Return the seconds until a failed request is repeated: not the same for all islands, which failed at once."""
        part = int(digest_of(self.identity.session, self._asked), 16) / 2**64
        return self.timing.retry_seconds * (1 + part) / 2

    def _pause_if_excluded(self) -> None:
        """Pause if the others continue without this member because its reduces failed; each pause doubles."""
        if self._failures >= decisions.EXCLUDE_AFTER:
            self._paused_until = self._now + self.timing.turnover_seconds * 2 ** min(
                self._times_excluded, MAX_DOUBLINGS
            )
            self._times_excluded += 1

    def _pauses(self, decision: Decision) -> bool:
        """Return whether this member stays out of the others' rounds; it does not if they wait for a member."""
        waits = isinstance(decision.plan, Wait) and not decision.plan.idle
        return self._now < self._paused_until and not waits

    def _is_wait_expired(self) -> bool:
        if self._waiting_since is None:
            return False
        dead = bool(self._missing) and self._missing <= self._dead
        return dead or self._now - self._waiting_since >= self.timing.turnover_seconds

    def _holds_rounds(self) -> bool:
        """Return whether rounds must wait for this healing, for a limited total time.

        After 1, 2, 4, ... vain heals, and in closing rounds.
        """
        return self._healing and self._is_hold_due() and self._hold_time() < self.timing.turnover_seconds

    def _is_hold_due(self) -> bool:
        is_closing = self._healing and self._wanted is not None and self._wanted.round >= self.rules.closing
        return is_closing or (self._vain_heals > 0 and self._vain_heals & (self._vain_heals - 1) == 0)

    def _hold_time(self) -> float:
        """Return the seconds for which rounds have waited since this member was last current, with failed tries."""
        now = self._now - self._healing_since if self._healing and self._is_hold_due() else 0.0
        return self._hold_time_before + now

    def _is_group_current(self, ballot: int) -> bool:
        """Return whether the last group's streams are open in all its members: it made the state, and has not failed.

        A member that was cut off does not know that the others have ended theirs.
        """
        made = self._committed
        if made is None or ballot > 1:
            return False
        return (made.held.key, made.outer.generation) == (self.outer.last, self.outer.generation)

    @property
    def others(self) -> tuple[Peer, ...]:
        """The other members of the newest round in which this member took part."""
        return tuple(peer for peer in self._group if peer.identity != self._me)

    @property
    def done(self) -> bool:
        """Whether the member has left or was rejected."""
        return self._done

    @property
    def leaving(self) -> bool:
        """Whether the member was told to leave: the next message may be the final one."""
        return self._leave_by is not None

    def _left_out_lines(self, form: FormGroup) -> list[str]:
        """Return the lines about messages left out, for the 1st, 2nd, 4th, ... consecutive time of an island."""
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

    def _absences(self, form: FormGroup) -> list[m.Action]:
        """Note who has contributed to the newest round; return the reports about members that have not for a while.

        A report is due after `ABSENT_ROUNDS` rounds and as many of the member's steps, and each time after twice the
        time. A message that is left out has another line.
        """
        actions: list[m.Action] = []
        for peer, weight in zip(form.members, form.weights, strict=True):
            name, is_own = peer.name, peer.identity == self._me
            last, at = self._contributed.setdefault(name, (self.outer.round, self._now))
            header = self._headers.get(peer.identity)
            if weight or header is None:
                self._contributed[name] = self.outer.round, self._now
                if self._told_at.pop(name, None) is not None and is_own:
                    actions.append(m.LeftOut(f"this island contributes again, to round {self.outer.round}", False))
                continue
            seconds, is_late = self._now - at, self.outer.round - last >= ABSENT_ROUNDS
            due = self._told_at.get(name, ABSENT_ROUNDS * header.step_seconds)
            if name not in form.left_out and is_late and seconds >= due:
                self._told_at[name] = 2 * seconds
                why = "no data is leased to it" if header.starved else "it had no message when rounds were due"
                step = f" (a step of it takes {header.step_seconds:.1f} s)" if header.step_seconds else ""
                who = "this island" if is_own else f"island {name}"
                text = f"{who} has contributed to no round since round {last}, {seconds:.0f} s ago: {why}{step}"
                actions.append(m.LeftOut(text) if is_own else m.LogLine(text, loud=True))
        return actions

    def _note_plan(self, decision: Decision) -> None:
        plan = decision.plan
        missing = tuple(peer.name for peer in decision.missing(self._group))
        self._plan = plan, (plan.names or missing) if isinstance(plan, Wait) else ()

    def _note_asks(self, decision: Decision) -> bool:
        """Return whether a request was in an earlier view too: it may be outdated, so the view is ignored."""
        asks = {identity: header.asked for identity, header in decision.headers.items()}
        repeated = any(self._asks.get(identity, 0) >= number for identity, number in asks.items())
        self._asks |= {identity: max(number, self._asks.get(identity, 0)) for identity, number in asks.items()}
        return repeated

    def _hear(self, error: str = "", held: str = "") -> None:
        """Record an answer of the coordinator: `held` is what it waits for; or the `error` in place of an answer."""
        self._error, self._held_request = error, held
        if not error:
            self._changed_at = self._now if self._is_coordinator_silent() else self._changed_at
            self._heard_at = self._now

    def _is_coordinator_silent(self) -> bool:
        return self._now - self._heard_at > SILENT_BEATS * self.timing.heartbeat_seconds / BEATS_PER_TIMEOUT

    def is_reason_known(self, since: float, seconds: float) -> bool:
        """Return whether the coordinator is silent, or has answered after `since` and for `seconds` without a change.

        Otherwise `stall_reason` may be outdated: a silence begins, this island has not caught up after one, or not all
        have given up a try that failed. A new request is unknown until the next heartbeat.
        """
        answers = self._heard_at >= since and self._now - self._changed_at >= seconds
        is_new = self._waiting_for and not self._held_request and not isinstance(self._plan[0], Wait)
        return (answers and not is_new) or self._is_coordinator_silent()

    def stall_reason(self) -> str:
        """Return why no round is committed, and the names waited for; empty if only this island's steps are missing."""
        exchange = self._exchange_reason()
        silence = self._now - self._heard_at
        if self._is_coordinator_silent():
            silent = f"the coordinator has not answered for {silence:.0f} s{f' ({self._error})' * bool(self._error)}"
            return f"{silent}; {exchange}" if exchange else silent
        if exchange:
            return exchange
        plan, names = self._plan
        if self._waiting_for and self._held_request:
            return f"{self._held_request}{self._tries()}"
        if isinstance(plan, Wait):
            return f"{plan.reason}{f' ({format_names(names)})' if names else ''}{self._tries()}"
        if self._held:
            names = format_names(peer.name for peer in self._held.form.members)
            result = f"the result of round {self.outer.round} is not held by more than half of its islands"
            return f"{result} ({names}) yet{self._tries()}"
        return ""

    def _exchange_reason(self) -> str:
        """Return the exchange with peers that is in progress; empty if there is none."""
        if self._reducing:
            names = {peer.name for peer in self._reducing[0].members}
            before = self._committed.form.members if self._committed else ()
            absent = format_names({peer.name for peer in before} - names)
            without = f", without {absent}" if absent else ""
            return f"round {self.outer.round} is being reduced by {format_names(names)}{without}{self._tries()}"
        if self._healing:
            failed = f"; the last try failed: {self._heal_failed}" if self._heal_failed else ""
            seconds = self._now - self._healing_since
            sources = format_names(peer.name for peer in self._sources)
            return f"this island fetches the state of {sources} for {seconds:.0f} s{failed}"
        return ""

    def _tries(self) -> str:
        silent = f", {format_names(self._unreachable)} did not answer" if self._unreachable else ""
        tries = "1 try" if self._failures == 1 else f"{self._failures} tries"
        return f"; {tries} failed{silent}" if self._failures else ""

    def next_tick(self) -> float:
        """Return the time of the next `Tick` that is needed without other events."""
        times = [math.inf if self._leave_by is None else self._leave_by]
        times.append(self._end_by if self._end_by > self._now else math.inf)
        if self._reducing:
            times.append(self._reducing[1])
        else:
            if self.handover.due:
                times.append(self._ping_at)
            if not self._waiting_for and (self.handover.due or self._held or self._needs_view):
                times.append(max(self._retry_at, 0.0 if self._message or self._is_closing else self._grace_end))
        return max(self._now, min(times))


def format_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
