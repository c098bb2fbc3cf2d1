"""One island in the protocol: a state machine. Events in, actions out; no sockets, clocks, threads or randomness.

A round of one member: `RoundDue` (its own steps are made, or a peer announces it) -> RequestMessage -> `MessageReady`
or the end of the grace -> RequestView -> `ViewReceived` -> Reduce -> `Reduced` -> RequestView, with the held result ->
`ViewReceived` -> Commit. A member that is behind heals from the sources of the view, and requests views meanwhile.
"""

import math
from dataclasses import replace

from gregale.islands.protocol import decision as decisions
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import (
    Adopt,
    CommitAccepted,
    Decision,
    FormGroup,
    NewGeneration,
    StartFleet,
    Wait,
    decide,
    recipients,
)
from gregale.islands.protocol.ledger import Ledger, advance
from gregale.islands.protocol.member_state import MOST_LINGERS, MemberState, PendingCommit
from gregale.islands.protocol.messages import NO_ROUND, AcceptedResult, Generation, OuterRecord, View
from gregale.islands.protocol.outliers import NOT_FINITE


class Member(MemberState):
    """The protocol of one island.

    `outer` is the record of the committed state (round -1: the common seed, with its digest). An island restored from a
    checkpoint passes the saved record, the `holder` of its lease, and the number of examples that this holder has
    `used`.
    """

    def handle(self, event: m.Event) -> list[m.Action]:
        """Return the actions that follow from `event`, in this order."""
        self._actions = []
        if not self._done:
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
                self._retry_at = self._now + self._some_pause()
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
        """Return whether a reduce may use the message."""
        return bool(self._waiting_for or self._reducing or self._held)

    def _on_early_message(self, round: int) -> None:
        serves = self.handover.serves(self.outer.round)
        if not (serves and (self.handover.due or self._is_promised())):
            self._request_message(round)

    def _on_message_ready(self, event: m.MessageReady) -> None:
        self._count(event)
        self._link = event.link
        self.handover.early = self._is_slow()
        if event.round in (self.handover.wanted, self.handover.number):
            self.handover.arrive(event)
            if event.norm is None:
                self._do(m.LogLine(f"this island's message of round {event.round} is not finite", loud=True))
                self._give_up_message()

    def _give_up_message(self) -> None:
        """Set the message's weight to 0, and restart the island from the outer parameters."""
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
        self._note_plan(decision)
        repeated, mine = self._note_asks(decision), decision.headers.get(self._me)
        if repeated or mine is None or mine.asked != self._asked:
            self._seen = 0
            return
        if self._me in decision.refused:
            self._done = True
            self._do(m.Rejected(f"{decision.refused[self._me]}; this island ends, the others go on"))
            return
        self._peers, self._fastest, self._headers = decision.addresses, decision.fastest, decision.headers
        self.handover.early = self._is_slow()
        if self._me in decision.current:
            self._vain_heals, self._hold_time_before = 0, 0.0
            self._needs_view = not (isinstance(decision.plan, Wait) and decision.plan.idle)
            if self.is_complete:
                self._serve(any(header.healing for header in view.headers))
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
        self._report_left_out(prepared.form)
        if prepared.last or (self.leaving and self.is_complete):
            self._leave()
        elif self._leave_by is not None:
            self._begin_round(own=True)

    def _report_left_out(self, form: FormGroup) -> None:
        self._do(*(m.LogLine(text, loud=True) for text in self._left_out_lines(form)), *self._absences(form))
        if form.left_out.get(self.identity.name, NOT_FINITE) != NOT_FINITE:  # otherwise it has found that out itself
            self.handover.state_replaced()
            contributed = zip(form.members, form.weights, strict=True)
            self._do(m.Reset(tuple(peer for peer, weight in contributed if weight)))

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
            self._voter = same and not self._done
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
        """Discard everything that belongs to the current round."""
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
        self._done = True
        self._do(m.LeaveDone())

    def _ask_if_needed(self) -> None:
        if self._done or self._waiting_for or self._reducing or self._now < self._retry_at:
            return
        # The others wait in a closing round for the messages of those that ask.
        asks = self._message is not None or self._is_closing or self._now >= self._grace_end
        ready = self.handover.due and asks
        if ready or self._held or self._accepted or self._needs_view:
            self._asked += 1
            self._heard_at = self._now if math.isnan(self._heard_at) else self._heard_at
            self._waiting_for = True
            self._do(m.RequestView(self.header, self._needed()))
