"""One island in the protocol: a state machine. Events in, actions out; no sockets, clocks, threads or randomness.

A round of one member: `RoundDue` (its own steps are made, or a peer announces it) -> RequestMessage -> `MessageReady`
or the end of the grace -> RequestView -> `ViewReceived` -> Reduce -> `Reduced` -> RequestView, with the held result ->
`ViewReceived` -> Commit. A member that is behind heals from the sources of the view, and requests views meanwhile.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gregale.islands.protocol import decision as decisions
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.choice import SILENT_BEATS
from gregale.islands.protocol.decision import (
    Adopt,
    CommitAccepted,
    Decision,
    FormGroup,
    NewGeneration,
    Plan,
    StartFleet,
    Wait,
    decide,
    recipients,
)
from gregale.islands.protocol.ledger import Ledger, advance, digest_of
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT
from gregale.islands.protocol.messages import (
    NO_ROUND,
    AcceptedResult,
    Generation,
    Header,
    OuterRecord,
    Peer,
    Rules,
    Timing,
    View,
)
from gregale.islands.protocol.outliers import NOT_FINITE, median
from gregale.islands.protocol.trainer_side import Handover

EQUAL_STEPS = 1.1  # times the shortest step: the steps of islands that count as equally fast
GRACE_STEPS = 1.5  # of the fastest member: others between two of their steps hand their messages over in time
SLOW_STEPS = 1.4  # of it: a member with longer steps is not waited for; less than the grace, which requests also take
ABSENT_ROUNDS = 3  # without a member's contribution, after which that is reported
MOST_LINGERS = 10  # times `linger_seconds`, for which a complete island hands its state over
HEAL_MARGIN = 1.5  # of the time that a heal took: rounds wait at most so much longer for the next one
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


class Member:
    """The protocol of one island.

    `outer` is the record of the committed state (round -1: the common seed, with its digest). An island restored from a
    checkpoint passes the saved record, the `holder` of its lease, and the number of examples that this holder has
    `used`.
    """

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
        self._fastest = self._copying = 0.0  # the shortest step, and the usual time of a copy, in the newest view
        self._needs_view = True  # must see a view, whether or not a round is due
        self._healing = False
        self._heard_at, self._error = math.nan, ""  # when the coordinator answered; why it did not answer since
        self._changed_at = 0.0  # the end of its last silence, or of the first failed try of a round
        self._held_request = ""  # what the coordinator waits for, by its last answer since the newest view
        self._plan: tuple[Plan | None, tuple[str, ...]] = (None, ())  # of the newest view, with the names it waits for
        self._sources: tuple[Peer, ...] = ()  # of the fetched state
        self._wanted: Header | None = None  # the header of the state that it fetches or has fetched
        self._heal_failed = ""
        self._left_out: dict[str, int] = {}  # rounds in a row to which diverged islands have contributed nothing
        self._contributed: dict[str, tuple[int, float]] = {}  # the newest round of each name, and when it was committed
        self._told_at: dict[str, float] = {}  # when the next line about a name is due that contributes nothing
        self._headers: Mapping[str, Header] = {}  # of the newest view, by identity
        self._vain_heals, self._healing_since = 0, 0.0  # consecutive heals after which it was behind again
        self._times_excluded, self._paused_until = 0, 0.0  # consecutive rounds that the others made without this member
        self._hold_time_before, self._longest_vain_heal = 0.0, 0.0  # seconds that rounds waited; of a heal in vain
        self._used = used
        self._leave_by: float | None = None
        self._complete_at: float | None = None  # when it became complete
        self._end_by = math.inf  # when it ends then, whoever is behind
        self._newest, self._behind = NO_ROUND, 0  # as of the newest heartbeat
        self._recorded = ""  # the digest of the run's last state, once most coordinators have recorded it
        self.saved: tuple[int, str] | None = None  # rounds and digest of the own last state, for them to record
        self.done = False  # it has left or was rejected
        self.handover = Handover()
        self.handover.fragments = rules.fragments_at(outer.round)
        self._from_checkpoint = outer.round > NO_ROUND
        self._forget_round()

    def handle(self, event: m.Event) -> list[m.Action]:
        """Return the actions that follow from `event`, in this order."""
        self._actions = []
        if not self.done:
            self._take(event)
            self._renew_if_old()
            self._ask_if_needed()
        return self._actions

    def _take(self, event: m.Event) -> None:
        match event:
            case m.Tick(now):
                self._on_tick(now)
            case m.RoundDue(round):
                self._on_round_due(round)
            case m.MessageReady():
                self._on_message_ready(event)
            case m.EarlyMessage(round):
                self._on_early_message(round)
            case m.ViewReceived(view):
                self._on_view_received(view)
            case m.ViewFailed(reason):
                # The request may have been part of a view nevertheless: this member is no witness any more.
                self._waiting_for, self._seen, self._error = False, 0, reason
                # Not the same pause for all islands, which failed at once.
                part = int(digest_of(self.identity.session, self._asked), 16) / 2**64
                self._retry_at = self._now + self.timing.retry_seconds * (1 + part) / 2
            case m.Heartbeat():
                self._on_heartbeat(event)
            case m.Reduced():
                self._on_reduced(event)
            case m.ReduceFailed():
                self._on_reduce_failed(event)
            case m.Healed(outer):
                self._on_healed(outer)
            case m.HealFailed(reason):
                self._end_healing()
                self._heal_failed, self._retry_at = reason, self._now + self.timing.retry_seconds
                self._do(m.LogLine(f"could not heal ({reason}); trying again"))
            case m.PeersDead(identities):
                self._dead |= identities
            case m.Saved():
                self.saved = self.outer.round, self.outer.fingerprint()
                self._end_by = self._now + self.timing.linger_seconds
            case m.Leave():
                self._on_leave()

    def _do(self, *actions: m.Action) -> None:
        self._actions.extend(actions)

    def _on_tick(self, now: float) -> None:
        self._now = now
        if self._reducing and self._now >= self._reducing[1]:
            self._do(m.DropGroup())
            self._reduce_failed(())
        if self.handover.due and not self._reducing and self._now >= self._ping_at:
            self._ping()
        if self._leave_by is not None and self._now >= self._leave_by:
            self._leave()
        if self.is_complete and self._complete_at is None:
            self._complete_at, self._end_by = self._now, self._now + self.timing.linger_seconds

    def _ping(self) -> None:
        self._ping_at, self._pings = self._now + self.timing.ping_seconds, self._pings + 1
        if len(self._peers) > 1:
            peers = recipients(self._peers, self._headers[self._me].hosts[0], self._pings)
            self._do(m.AnnounceRound(peers, self.outer.round))

    def _on_round_due(self, round: int | None) -> None:
        if round is not None and round > self.outer.round:
            self._needs_view = True
        elif round in (None, self.outer.round) and self.outer.round > NO_ROUND and not self.is_complete:
            self._begin_round(own=round is None)

    def _begin_round(self, own: bool) -> None:
        handover = self.handover
        if own and handover.due and handover.sent:
            handover.old = True
        handover.own = handover.own or own
        if not handover.due:
            handover.fall_due(self._now)
            self._ping()
            self._grace_end = self._now + self._grace()
            if handover.serves(self.outer.round) and self._is_promised():
                return
            if not handover.early or self.leaving or self._is_closing or (own and not handover.sent):
                self._request_message(self.outer.round)
            elif not handover.serves(self.outer.round):
                self._grace_end = self._now  # its step takes longer

    def _request_message(self, number: int) -> None:
        self.handover.want(number)
        self._do(m.RequestMessage(number))

    def _renew_if_old(self) -> None:
        """Request another message in place of an old one, when no reduce can use the old one any more."""
        if self.handover.old and not self._is_promised():
            self._grace_end = self._now + self._grace()
            self._request_message(self.outer.round)

    def _is_promised(self) -> bool:
        return bool(self._waiting_for or self._reducing or self._held)

    def _on_early_message(self, round: int) -> None:
        serves = self.handover.serves(self.outer.round)
        if not (serves and (self.handover.due or self._is_promised())):
            self._request_message(round)

    def _on_message_ready(self, event: m.MessageReady) -> None:
        if self.rules.stage_at(event.round) == self.rules.stage_at(self.outer.round):  # another has other examples
            self._used = max(self._used, event.used)
        self._link = event.link
        self._learn_pace()
        if event.round in (self.handover.wanted, self.handover.number):
            self.handover.arrive(event)
            if event.norm is None:
                self._do(m.LogLine(f"this island's message of round {event.round} is not finite", loud=True))
                self._give_up_message()

    def _give_up_message(self) -> None:
        if self.handover.snapshot is not None:
            self.handover.snapshot = replace(self.handover.snapshot, weight=0.0)
        self._do(m.Reset(self.others))

    def _on_heartbeat(self, event: m.Heartbeat) -> None:
        self._hear(event.error, event.held)
        if not event.error:
            self._newest, self._behind = event.newest, event.behind
            self._recorded = self._recorded or event.recorded
            if self._newest >= self.rules.rounds and (self._behind or not self.is_complete or self.differs):
                self._needs_view = True  # of some that are complete and some that fetch their state

    def _on_reduced(self, event: m.Reduced) -> None:
        if self._reducing is None or self._reducing[0].key != event.key:
            return
        form, _ = self._reducing
        self._reducing = None
        if self._held:
            self._do(m.Discard(self._held.held.key))
        self._accepted = None
        ledger = form.ledger_after(self.outer, self.rules)
        sizes = form.sizes_after(self.outer.sizes)
        outer = OuterRecord(
            self.outer.generation, self.outer.round + 1, event.digest, form.key, form.voters, ledger, sizes
        )
        held = AcceptedResult(form.key, form.ballot, outer.fingerprint(), form.identities, form.electors, form.stamp)
        weight = form.weights[form.ranks[self._me]]
        self._held = PendingCommit(held, outer, weight, self._me in form.leaving, form)

    def _on_reduce_failed(self, event: m.ReduceFailed) -> None:
        if self._reducing and self._reducing[0].key == event.key:
            self._reduce_failed(event.unreachable)
            if event.overflowed:
                self._do(
                    m.LogLine(f"the outer step of round {self.outer.round} is not finite: all begin it again", True)
                )
                self._give_up_message()

    def _reduce_failed(self, unreachable: tuple[str, ...]) -> None:
        self._reducing = None
        self._failures += 1
        self._silent.append(unreachable)
        # Of three that reach nobody, two that try alone forget the third, so more tries count once these are many.
        tries = self._silent[-1 - self._failures // decisions.SPLIT_AFTER :]
        self._unreachable = tuple(sorted({name for names in tries for name in names}))
        self._changed_at = self._now if self._failures == 1 else self._changed_at

    def _on_healed(self, outer: OuterRecord) -> None:
        self._end_healing()
        wanted = self._wanted
        assert wanted is not None
        if (outer.round, outer.generation) < (wanted.round, wanted.generation):
            self._do(
                m.LogLine(f"a source gave round {outer.round} in place of {wanted.round}; healing again", loud=True)
            )
            return
        if (outer.round, outer.generation) <= (self.outer.round, self.outer.generation) and not self._differs:
            return
        # An earlier process of this island, or a reduce that it left, may have contributed its steps already.
        keeps = self.outer.round > NO_ROUND and not (self._differs or self._from_checkpoint or self._contributes)
        self._drop_round()
        self.handover.state_replaced()
        self._adopt(outer)
        is_wanted = (outer.round, outer.generation) == (wanted.round, wanted.generation)
        self._electors = wanted.electors if is_wanted else ()
        self._voter, self._seen, self._from_checkpoint = False, 0, wanted.from_checkpoint
        self.holder, self._heal_failed, self._vain_heals = self.identity.session, "", self._vain_heals + 1
        self._longest_vain_heal = max(self._longest_vain_heal, self._now - self._healing_since)
        self._do(m.Install(outer, keeps))
        self._needs_view, self._waiting_for, self._retry_at = True, False, self._now  # the requested header is outdated

    def _end_healing(self) -> None:
        self._hold_time_before = self._hold_time()
        self._healing = False

    def _on_leave(self) -> None:
        if self._leave_by is None:
            self._leave_by = self._now + self.timing.leave_seconds
            if self._healing or self.outer.round == NO_ROUND or self.is_complete:
                self._leave()
            else:
                self._begin_round(own=True)

    def _on_view_received(self, view: View) -> None:
        if not self._waiting_for:
            return
        self._waiting_for = False
        decision = decide(view, self.rules)
        self._hear()
        plan, missing = decision.plan, tuple(peer.name for peer in decision.missing(self._group))
        self._plan = plan, (plan.names or missing) if isinstance(plan, Wait) else ()
        repeated, mine = self._note_asks(decision), decision.headers.get(self._me)
        if repeated or mine is None or mine.asked != self._asked:
            self._seen = 0
            return
        if self._me in decision.refused:
            self.done = True
            self._do(m.Rejected(f"{decision.refused[self._me]}; this island ends, the others go on"))
            return
        self._peers, self._headers = decision.addresses, decision.headers
        self._fastest, self._copying = decision.fastest, decision.copying
        self._learn_pace()
        if self._me in decision.current:
            self._vain_heals, self._hold_time_before, self._longest_vain_heal = 0, 0.0, 0.0
            self._needs_view = not (isinstance(plan, Wait) and plan.idle)
            if self.is_complete:
                # One that is behind begins to fetch the state with this view.
                self._serve(any(each.healing or each.identity not in decision.current for each in view.headers))
            if self.rules.majority:
                self._electors, self._voter = decision.electors, self._me in decision.electors
                if not self._voter and decision.headers.keys() >= set(self._electors):
                    self._group = tuple(peer for peer in decision.sources if peer.identity in self._electors)
            self._follow(view, decision)
        else:
            self._catch_up(decision)

    def _serve(self, heals: bool) -> None:
        """Wait for the islands that are behind, for as long as one of them fetches the state, with a limit."""
        self._needs_view, linger = self._behind > 0 or self.differs, self.timing.linger_seconds
        if heals and self._complete_at is not None and not self.saved:
            self._end_by = min(self._now + linger, self._complete_at + MOST_LINGERS * linger)

    def _follow(self, view: View, decision: Decision) -> None:
        plan = decision.plan
        if isinstance(plan, Wait):
            self._wait(plan, decision)
            # Members do not act on such a view: a member of every view until this one is a witness still.
            if self._seen and view.id - self._seen in (0, 1):
                self._seen = view.id
            return
        self._waiting_since, self._missing = None, frozenset()
        if isinstance(plan, FormGroup):
            self._form(view, plan)
        elif isinstance(plan, CommitAccepted):
            if self._held is not None and (self._held.held.key, self._held.held.digest) == (plan.key, plan.digest):
                self._commit(view)
            elif self._accepted and self._accepted[0].key == plan.key and (outer := self._accepted[1]):
                self._renew(view, outer)
            else:
                if self.rules.majority:
                    self._retry_at = self._now + self.timing.retry_seconds
                self._seen = 0  # it lacks the committed result: the next view names the sources for healing
        elif isinstance(plan, NewGeneration):
            self._begin_generation(view, plan)
        elif isinstance(plan, Adopt):
            self._accept(view, plan)
        else:
            self.outer = replace(self.outer, ledger=advance(Ledger(), plan.reports, self.rules.lease_policy))
            self._change_generation(plan.generation, 0, plan.voters)
            self._group = decision.sources
            self._electors = tuple(peer.identity for peer in decision.sources)
            self._enter(view, m.Publish(self.outer))
            self._do(m.LogLine(f"the fleet begins with {plan.voters} islands"))

    def _wait(self, plan: Wait, decision: Decision) -> None:
        self._retry_at = self._now + self.timing.retry_seconds
        self._lacked = self._lacked or plan.lacking
        handover, number = self.handover, self.outer.round
        if plan.idle and handover.due and not handover.serves(number) and handover.wanted != number:
            self._request_message(number)  # nobody else contributes, who may have been faster
        if self._is_closing and not (handover.due or plan.missing or plan.lacking):
            self._begin_round(own=False)  # as after a heal: the others have announced it before
        if plan.missing and self._waiting_since is None:
            self._waiting_since = self._now
            seconds = "" if self.rules.majority else f" {self.timing.turnover_seconds:g} s"
            self._do(m.LogLine(f"{plan.reason}: waiting{seconds} for them", loud=True))
        if plan.missing and (self._voter or self.rules.majority):
            missing = decision.missing(self._group)
            self._missing = frozenset(peer.identity for peer in missing)
            self._do(m.ProbePeers(missing))

    def _enter(self, view: View, action: m.Action) -> None:
        """Adopt a record that was agreed in `view`."""
        self._voter, self._seen, self._needs_view = True, view.id, False
        self._do(action)

    def _form(self, view: View, plan: FormGroup) -> None:
        if self._me in plan.ranks:
            self._seen, self._ballot = view.id, plan.ballot
            if not self._is_group_current(plan.ballot):
                self._do(m.DropGroup())
            self._contributes = self._contributes or plan.weights[plan.ranks[self._me]] > 0
            self._reducing = (plan, self._now + self.timing.reduce_seconds)
            self._do(m.Reduce(plan.key, self.outer.round, plan.members, plan.weights, plan.parts))
        else:
            self._pause_if_excluded()

    def _accept(self, view: View, plan: Adopt) -> None:
        """Hold a result of another view in place of an older one."""
        self._seen, self._needs_view, held = view.id, True, self._held
        if not self._voter:
            self._retry_at = self._now + self.timing.retry_seconds
        elif held and (held.held.key, held.held.digest) == (plan.result.key, plan.result.digest):
            self._held, self._accepted = replace(held, held=plan.result), None
        else:
            if held:
                self._do(m.Discard(held.held.key))
            result, outer, renewal = plan.result, None, plan.renewal
            if renewal:
                ledger = advance(self.outer.ledger, renewal.reports, self.rules.lease_policy)
                generation, voters = renewal.generation, len(renewal.identities)
                outer = replace(self.outer, ledger=ledger, generation=generation, voters=voters)
                result = replace(result, digest=outer.fingerprint())
            elif self._accepted and self._accepted[0].key == result.key:
                outer = self._accepted[1]
            self._held, self._accepted = None, (result, outer)

    def _renew(self, view: View, outer: OuterRecord) -> None:
        """Begin the accepted generation of the same state."""
        assert self._accepted is not None
        members, self._electors = self._accepted[0].members, self._accepted[0].members
        self._do(m.LogLine(f"generation {outer.generation.number} from round {outer.round}: new leases of data", True))
        self._drop_results()
        self.outer, self.handover.starved = outer, False
        self._group = tuple(peer for peer in self._group if peer.identity in members)
        self._enter(view, m.Publish(outer))

    def _commit(self, view: View | None, generation: Generation | None = None, voters: int | None = None) -> None:
        assert self._held is not None
        prepared, self._held, self._from_checkpoint = self._held, None, False
        self._adopt(prepared.outer)
        if generation is not None and voters is not None:
            self.outer = replace(self.outer, generation=generation, voters=voters)
        self._drop_round()
        self.handover.next_round(used=prepared.weight > 0)
        self._voter, self._needs_view, self._group = not prepared.last, False, prepared.form.members
        same = generation in (None, prepared.outer.generation)
        self._electors = tuple(each for each in prepared.form.identities if same and each not in prepared.form.leaving)
        self._committed = prepared
        self._seen = view.id if view else 0
        self._do(m.Commit(prepared.held.key, self.outer, prepared.weight))
        self._times_excluded = 0 if len(prepared.form.members) > 1 else self._times_excluded
        form = prepared.form
        self._do(*(m.LogLine(text, loud=True) for text in self._left_out_lines(form)), *self._absences(form))
        if form.left_out.get(self.identity.name, NOT_FINITE) != NOT_FINITE:  # otherwise it has found that out itself
            self.handover.state_replaced()
            contributed = zip(form.members, form.weights, strict=True)
            self._do(m.Reset(tuple(peer for peer, weight in contributed if weight)))
        if prepared.last or (self.leaving and self.is_complete):
            self._leave()
        elif self._leave_by is not None:
            self._begin_round(own=True)

    def _begin_generation(self, view: View, plan: NewGeneration) -> None:
        if self._me not in plan.identities:
            self._pause_if_excluded()
            self._seen = 0  # it lacks the committed result: the next view names the sources for healing
            return
        text = f"generation {plan.generation.number} from round {self.outer.round}: {plan.reason}"
        self._do(m.LogLine(text, loud=True))
        if plan.commit:
            self._commit(view, plan.generation, len(plan.identities))
        else:
            self.outer = replace(self.outer, ledger=advance(self.outer.ledger, plan.reports, self.rules.lease_policy))
            self._change_generation(plan.generation, self.outer.round, len(plan.identities))
            self.handover.starved = False  # as far as this member knows: it may have a lease now
            self._enter(view, m.Publish(self.outer))
        self._group, self._electors = plan.members, tuple(peer.identity for peer in plan.members)

    def _catch_up(self, decision: Decision) -> None:
        self._needs_view, top = True, decision.top
        if top is None:
            self._retry_at = self._now + self.timing.retry_seconds
            return
        top = replace(top, electors=decision.electors)
        if isinstance(decision.plan, StartFleet):
            electors = tuple(peer.identity for peer in decision.sources)
            top = replace(top, round=0, generation=decision.plan.generation, electors=electors)
        held = self._held.held if self._held else None
        if held and (held.key, held.digest) == (top.last, top.digest):
            same = self.outer.generation == top.generation
            self._commit(None, top.generation, top.voters)
            self._voter = same and not self.done
        elif self._pauses(decision) or self.saved:
            self._retry_at = self._now + self.timing.retry_seconds
        elif self.outer.fingerprint() == top.digest and max(self.outer.round, 0) == top.round:
            self._change_generation(top.generation, top.round, top.voters)
            self._voter, self._seen, self._electors = False, 0, top.electors
            self._do(m.Publish(self.outer))
        elif not self._healing:
            self._differs = self._me in decision.differ
            if self._differs:
                self._do(m.LogLine("this island's outer state is not that of the others; it heals", loud=True))
            self._healing, self._wanted, self._healing_since = True, top, self._now
            self._sources = decision.sources
            self._do(m.Heal(decision.sources, top.generation, top.round, top.digest))

    def _change_generation(self, generation: Generation, round: int, voters: int) -> None:
        """Move the same state to another generation; a due round stays due."""
        self._drop_results()
        self.outer = replace(self.outer, generation=generation, round=round, voters=voters)

    def _drop_round(self) -> None:
        self._drop_results()
        self._forget_round()

    def _drop_results(self) -> None:
        if self._reducing:
            self._do(m.DropGroup())
        if self._held:
            self._do(m.Discard(self._held.held.key))
        self._reducing = self._held = self._accepted = None
        self._ballot = self._failures = 0

    def _leave(self) -> None:
        self._drop_round()
        self.done = True
        self._do(m.LeaveDone())

    def _ask_if_needed(self) -> None:
        if self.done or self._waiting_for or self._reducing or self._now < self._retry_at:
            return
        # The others wait in a closing round for the messages of those that ask.
        asks = self._message is not None or self._is_closing or self._now >= self._grace_end
        ready = self.handover.due and asks
        if ready or self._held or self._accepted or self._needs_view:
            self._asked += 1
            self._heard_at = self._now if math.isnan(self._heard_at) else self._heard_at
            self._waiting_for = True
            self._do(m.RequestView(self.header, self._needed()))

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
            copy_seconds=self._published_copy(),
            link=self._link,
            recorded=self._recorded,
            electors=self._electors if is_strict else (),
            prepared=is_strict and (self._accepted[1] if self._accepted else self._held) is not None,
            dead=tuple(sorted(self._dead.intersection(self._electors))) if is_strict else (),
            known=tuple(lease.name for lease in outer.ledger.leases) if is_strict else (),
        )

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
        return self._is_closing and self.handover.due and not self.rules.lockstep and self._now >= self._grace_end

    def _grace(self) -> float:
        """Return the seconds for which a round waits for this member's step and for the copy of its message.

        The others wait no longer than this, so a member whose copy takes longer requests the view without its message.
        """
        grace, timing = self.timing.grace_seconds, self.timing
        step, copy = self.handover.step_seconds, self.handover.copy_seconds
        if self._is_closing:
            return max(GRACE_STEPS * step, timing.leave_seconds) + 2 * copy
        if grace is None and self._fastest:
            grace = min(GRACE_STEPS * self._fastest, timing.max_grace_seconds)
        elif grace is None:  # the first round: the others' steps are not known yet, and they wait no longer
            grace = min(GRACE_STEPS * step, timing.join_seconds)
        return grace + 2 * min(copy, self._copying)

    def _published_copy(self) -> float:
        copy, early = self.handover.copy_seconds, self.handover.early
        return max(round(copy, 3), 0.001) if copy and not early else 0.0

    def _learn_pace(self) -> None:
        self.handover.grace_seconds, self.handover.early = self._grace(), self._is_slow()

    def _is_slow(self) -> bool:
        """Return whether this member's steps, or copies of its messages, are too long for the others to wait."""
        step, copy, usual = self.handover.step_seconds, self.handover.copy_seconds, SLOW_STEPS * self._fastest
        # Where rounds follow one another in few steps, even a short wait makes them fewer.
        most = max(EQUAL_STEPS * self._fastest, min(usual, self.handover.interval_seconds / 2))
        # A message waits on the device for a step that is queued, of which an island that is slow has none.
        copied = copy if self.handover.early else copy - step
        is_slow = most < step or (self._copying > 0 and usual + 2 * self._copying < step + copied)
        knows = self._fastest > 0 and self.handover.interval_seconds < math.inf  # otherwise nothing tells what is early
        return knows and not self.rules.lockstep and is_slow

    def _needed(self) -> int:
        """Return the smallest number of members of a view that is of use to this member."""
        if self.is_complete:
            return 1
        return max(self.rules.minimum, self.rules.start if self._from_checkpoint or self.outer.round == NO_ROUND else 1)

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
        """Return whether rounds must wait for this healing, in all about as long as one took; see `_is_hold_due`."""
        limit = self.timing.turnover_seconds + HEAL_MARGIN * self._longest_vain_heal
        return self._healing and self._is_hold_due() and self._hold_time() < limit

    def _is_hold_due(self) -> bool:
        """Return whether it is a closing round, or the heal after 1, 2, 4, ... vain ones."""
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
        return tuple(peer for peer in self._group if peer.identity != self._me)

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
