"""The driver of an island: converts observations to protocol events and carries out the protocol's actions.

Between steps the trainer requests a command (`order`). It waits for the network only where the method requires that.
Slow work runs in threads: view requests, exchange, healing, messages to peers.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Condition, RLock, Thread
from typing import Any

from gregale.errors import UserError
from gregale.islands import trainer_command as commands
from gregale.islands.data_leases import DataLeases
from gregale.islands.exchange import LatestWork, announce, dead_peers, exchanged, fetched
from gregale.islands.host_group import COPY_SECONDS, HostGroup, Recovery
from gregale.islands.host_worker import OuterSnapshot
from gregale.islands.inner_optimizer_state import InnerOptimizerState
from gregale.islands.protocol import messages as protocol
from gregale.islands.protocol.headers import NO_ROUND, OuterRecord, View
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.running_time import RunningTime
from gregale.islands.protocol.stalls import Stalls
from gregale.islands.protocol.trainer_side import TrainerSide
from gregale.islands.round_log import RoundLog
from gregale.islands.transport.client import RequestRejected
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.lighthouse import NAME as LIGHTHOUSE
from gregale.islands.view_poller import ViewPoller

TICK_SECONDS = 0.1
LEAST_TICK_SECONDS = 0.005
ANNOUNCING_THREADS, TELLING_THREADS = 8, 2  # the latter for probes of missing peers, and for stall lines


UNKNOWN = (
    "The run is complete here and saved, but half of the lighthouses or more have not recorded that: other islands may "
    "end with other parameters. The same command, once they answer, makes sure."
)
DIFFERS = (
    "The run is complete with other parameters than this island has saved. The same command takes them over from an "
    "island that has them, if that is started again too."
)


class Unconfirmed(UserError):
    """This island cannot know that its last state is the run's."""

    exit_code = os.EX_TEMPFAIL


@dataclass
class Driver:
    """The connection between one `Member`, the transport and the trainer.

    - `report(text, loud)`: receives a line for the user
    - `record(values)`: receives a finished round, for rounds.jsonl
    - `note_stalled(line)`: receives the reason why rounds have stopped, for `gregale watch`; None: rounds continue
    - `compiles`: returns whether the trainer waits for the compiler
    - `stop_asked`: returns whether the user wants this island to stop; checked while the trainer waits
    - `steps`: of the restored checkpoint (`to_save`)
    """

    member: Member
    coordinator: CoordinatorClient
    worker: HostGroup
    leases: DataLeases
    pace: commands.RoundPacing
    token: bytes
    report: Callable[[str, bool], None]
    record: Callable[[dict[str, Any]], None]
    note_stalled: Callable[[str | None], None] = lambda line: None
    compiles: Callable[[], bool] = lambda: False
    stop_asked: Callable[[], bool] = lambda: False
    steps: int = 0

    def __post_init__(self):
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._time, self._heartbeat = RunningTime(), protocol.Heartbeat()
        self._trainer = TrainerSide(self.pace, self.member.handover, self._time(), self.steps)
        self.stalls = Stalls(self.member, self._trainer, self.compiles)
        self.waiting_seconds = self.healing_seconds = 0.0
        self._refused: UserError | None = None
        self._failure: BaseException | None = None
        self._leaving = self._is_copy_wanted = self._closed = False
        self._copied_step = 0
        self._asking = ViewPoller(
            self.coordinator,
            seen=self._viewed,
            failed=lambda reason: self.post(protocol.ViewFailed(reason)),
            complain=lambda complaint: self.report(complaint, True),
            refused=self._end,
        )
        self._log = RoundLog(self.worker.count, self.record)
        threads = (ThreadPoolExecutor(1, name) for name in ("copying", "exchange", "healing"))
        self._copying, self._exchange, self._healing = threads
        self._announcing = LatestWork(ANNOUNCING_THREADS, "announcing")
        self._telling = LatestWork(TELLING_THREADS, "telling")
        self._recovery = Recovery(self.worker, self._restart, partial(self._healing.submit, self._guarded))
        self.outer: OuterRecord | None = None

    def start(self) -> None:
        """Start the threads; the coordinator learns of this island."""
        if self.member.is_complete:
            self._take_over(self.member.outer)
        Thread(target=self._tick, daemon=True, name="tick").start()

    # Methods that the trainer calls, from its own thread.

    def stepped(self) -> None:
        """Count a step that was dispatched to the device."""
        with self._lock:
            self._trainer.stepped(self._time(), self.waiting_seconds)

    def order(self, starved: bool = False) -> commands.TrainerCommand | None:
        """Return the trainer's next command; None: take a step.

        It waits before the start, where `RoundPacing.waits` is true, and if `starved` until data is leased. Raises
        `UserError` if the fleet rejects this island.
        """
        began = time.monotonic()
        with self._changed:
            self._log.wait_begins()
            while True:
                if self._failure is not None:
                    raise RuntimeError("a thread of the island failed") from self._failure
                if self._refused is not None:
                    raise self._refused
                order = self._order(starved)
                waits = self._leaving or self.is_complete or self._trainer.must_wait(self.round, self._time())
                if order is not None or not (waits or (starved and self.leases.is_empty())):
                    break
                if self.stop_asked() and not self._leaving:
                    self.leave()
                    continue
                self._changed.wait(0.5)
            self.waiting_seconds += time.monotonic() - began
            self._log.wait_ends()
            self.worker.ordered(order)
            return order

    @property
    def side(self) -> OuterSnapshot:
        """The outer state at the last command: the trainer follows that command with it and saves it."""
        return self.worker.side

    def take(self) -> int | None:
        """Take the next batch and return its first example; None if no example is leased."""
        with self._lock:
            first = self.leases.take()
            self.worker.granted(first)
            return first

    def used(self, batches: int) -> int:
        """Return the number of examples used by the lease holder after this process's first `batches` batches."""
        return self.leases.used_after(batches)

    def to_save(self, batches: int) -> dict[str, Any]:
        """Return the values of a checkpoint after this process's first `batches` batches.

        - `steps`: the number of steps that no round in the parameters includes
        - `holder`: the session that holds the leases; `used`: the number of examples that it has used
        """
        with self._lock:
            return {"steps": self._trainer.undecided_steps, "holder": self.leases.holder, "used": self.used(batches)}

    def message_sent(self, number: int, fetch_down: Callable[[], commands.Down], used: int) -> None:
        """Accept the message of a round; `fetch_down` waits until the message is on the host."""
        with self._lock:
            count = self._trainer.message_sent(number, self._time())
            self._log.begin()

        def store(found: commands.Down) -> None:
            self.worker.store_messages(number, found.messages)
            with self._lock:
                if count == self.member.handover.count:  # otherwise the message is obsolete
                    self._trainer.copied(self._time())
                    self.post(
                        protocol.MessageReady(number, found.weight, used, self._leaving, found.norm, self.worker.link)
                    )

        # Not in the thread of reduces: a round without this message does not wait until the device has computed it.
        def down() -> None:
            self._exchange.submit(self._guarded, partial(store, fetch_down()))

        self._copying.submit(self._guarded, down)

    def diverged(self) -> bool:
        """Restart the trainer, whose state is not finite, from the outer parameters; return whether it restarts."""
        with self._lock:
            peers, is_first = self.member.others, not self._recovery.is_tried
            if restarts := bool(peers) or is_first:  # a second time without peers `max_skipped` ends the run
                self._recovery.begin(peers)
            if is_first:
                what = "this island has diverged (its loss, gradient or state is not finite)"
                self.report(f"{what}: it begins again from the outer parameters of round {self.round}", True)
            return restarts

    def leave(self) -> None:
        """Request to leave: the current round is finished first; then `order` returns `Finish`."""
        with self._lock:
            self._leaving = True
        self.post(protocol.Leave())

    @property
    def round(self) -> int:
        """The number of committed rounds; -1 before the fleet starts."""
        return self.outer.round if self.outer is not None else NO_ROUND

    @property
    def is_complete(self) -> bool:
        """Whether the last round is in the parameters."""
        return self.member.is_complete and self._trainer.all_arrived()

    @property
    def is_early(self) -> bool:
        """Whether this island hands messages over before rounds are due, as its steps are long."""
        return self.member.handover.early

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members of the newest round."""
        return self._log.members

    def show(self) -> dict[str, Any]:
        """Have all hosts serve a copy of the inner optimizer to a joiner. Raises RequestRejected."""
        with self._changed:
            self._is_copy_wanted = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._is_copy_wanted, COPY_SECONDS):
                raise RequestRejected("no step has ended in time")
            step = self._copied_step
        self.worker.await_copies(step)
        return {}

    def shown(self, inner: InnerOptimizerState) -> None:
        """Serve this copy of the inner optimizer to joining islands."""
        self.worker.show(inner)
        with self._changed:
            self._is_copy_wanted, self._copied_step = False, inner.step
            self._changed.notify_all()

    def inherited(self) -> InnerOptimizerState | None:
        """Return and clear this host's shards of a peer's inner optimizer, for a command with `inherits`."""
        return self.worker.inherited()

    def confirm(self) -> None:
        """Wait until most coordinators have recorded the last state, which is saved. Raises `Unconfirmed`."""
        if not self.is_complete:
            return
        self.post(protocol.Saved())
        self.coordinator.saved = self.member.saved
        with self._changed:
            while (verdict := self.member.verdict) is None and not (self.stop_asked() or self._refused):
                self._changed.wait(0.5)
        if not verdict:
            raise self._refused or Unconfirmed(DIFFERS if self.member.differs else UNKNOWN)

    def close(self) -> None:
        """Stop the threads; the peers learn that this island has left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._asking.close()
        for threads in (self._announcing, self._telling, self._copying, self._exchange, self._healing):
            threads.shutdown(wait=False, cancel_futures=True)
        self.worker.close()

    def _order(self, starved: bool) -> commands.TrainerCommand | None:
        trainer, number = self._trainer, self.round
        starved = starved and self.leases.is_empty()
        is_last = self._leaving or starved
        if (arrival := trainer.arrival(is_last)) is not None:
            return arrival
        if self._is_copy_wanted:
            return commands.CopyInnerState()
        if self.member.done or (self.is_complete and self.member.may_end):
            return commands.Finish(self.is_complete and not self.member.leaving)
        return None if self.is_complete else trainer.message(number, self._time(), self.post, is_last, starved)

    # Events and actions.

    def _viewed(self, view: View) -> None:
        addresses = {header.name: header.hosts for header in view.headers}
        self.worker.meet(self.member.identity.name, addresses, f"{self.coordinator.address}/{LIGHTHOUSE}")
        self.post(protocol.ViewReceived(view))

    def post(self, event: protocol.Event) -> None:
        """Pass an event to the protocol and carry out the resulting actions, in order."""
        with self._changed:
            if not self._closed:
                self._guarded(lambda: self._handle(event))
                self._changed.notify_all()

    def _handle(self, event: protocol.Event) -> None:
        for each in (protocol.Tick(self._time()), event):
            for action in self.member.handle(each):
                self._carry_out(action)

    def _carry_out(self, action: protocol.Action) -> None:
        match action:
            case protocol.RequestView(header, needed):
                self._asking.ask(header, needed)
            case protocol.AnnounceRound(addresses, number):
                for address in addresses:
                    self._announcing.put(address, partial(announce, address, self.token, number, self.worker.dial))
            case protocol.RequestMessage() | protocol.LeaveDone():
                pass  # `post` wakes the trainer: its side finds a request in the handover, and `order` the leave
            case protocol.Reduce():
                self._exchange.submit(self._guarded, lambda: self._reduce(action))
            case protocol.Commit(key, outer, weight):
                self.worker.commit(key, outer)
                self._committed(outer, weight)
            case protocol.Discard(key):
                self.worker.discard(key)
            case protocol.DropGroup():
                self.worker.drop_group()
            case protocol.ProbePeers(peers):
                self._telling.put("probe", lambda: self.post(protocol.PeersDead(dead_peers(peers))))
            case protocol.Heal():
                self._healing.submit(self._guarded, lambda: self._heal(action))
            case protocol.Install(outer, keeps):
                arrival = commands.LoadOuterState(outer.round, self.worker.install(outer), keeps)
                self._ended(outer, arrival, 0.0, healed=True)
            case protocol.Publish(outer):
                self._take_over(outer)
                self.worker.publish(outer)
            case protocol.Reset(peers):
                self._recovery.begin(peers)
            case protocol.LogLine(text, loud):
                self.report(text, loud)
            case protocol.LeftOut(text, is_left_out):
                self.report(text, is_left_out)
                self._telling.put("stalled", partial(self.note_stalled, text if is_left_out else None))
            case protocol.Rejected(text):
                self._end(UserError(text))

    def _committed(self, outer: OuterRecord, weight: float) -> None:
        save_offset = 0.0 if self.pace.lockstep else self._log.save_offset(self.member.identity.name)
        if weight:
            self._recovery.contributed()
        self._ended(outer, commands.ApplyRound(outer.round - 1, weight, save_offset), weight)

    def _ended(self, outer: OuterRecord, arrival: commands.Arrival, weight: float, healed: bool = False) -> None:
        """Adopt the outer state after a round or a heal."""
        self._take_over(outer)
        self._trainer.round_decided(arrival, self._time())
        self._log.end(outer, weight, healed)
        if text := self.stalls.went_on(self._time(), outer, healed):
            self._tell_stalled(text, False)

    def _tell_stalled(self, text: str, stalled: bool) -> None:
        """Report to the user, the coordinator and `gregale watch` why rounds have stopped, or that they continue."""
        self.report(text, stalled)
        self.coordinator.report(self.round, self.stalls.reason)
        self._telling.put("stalled", partial(self.note_stalled, text if stalled else None))

    def _restart(self, inherits: bool) -> None:
        with self._changed:
            self._trainer.round_decided(commands.LoadOuterState(self.round, inherits), self._time())
            self._changed.notify_all()

    def _take_over(self, outer: OuterRecord) -> None:
        self.outer = outer
        self.coordinator.report(outer.round, self.stalls.reason)
        self.leases.update(outer.ledger, self.member.holder)

    # Methods that run in threads.

    def _reduce(self, action: protocol.Reduce) -> None:
        self._log.members = tuple(member.name for member in action.members)
        self.post(exchanged(action, self.member, self.worker, self.token, self.report))

    def _heal(self, action: protocol.Heal) -> None:
        with self._lock:
            self._log.begin()
        began = time.monotonic()
        event = fetched(action, self.worker, self.pace)
        self.healing_seconds += time.monotonic() - began
        self.post(event)

    def _tick(self) -> None:
        while not self._closed:
            self._asking.look()
            with self._lock:
                before, self._heartbeat = self._heartbeat, self.coordinator.last_heartbeat
                self.post(protocol.Tick(self._time()) if before is self._heartbeat else self._heartbeat)
                if text := self.stalls.look(self._time(), self._time.stopped):
                    self._tell_stalled(text, True)
                if self.coordinator.revoked is not None:
                    self._end(self.coordinator.revoked)
                due = self.member.next_tick() - self._time()
            time.sleep(min(TICK_SECONDS, max(LEAST_TICK_SECONDS, due)))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`; an error in a thread ends the run, because otherwise the run would wait forever."""
        try:
            work()
        except BaseException as error:
            self._failure = None if isinstance(error, UserError) else error
            self._end(error if isinstance(error, UserError) else UserError(str(error)))

    def _end(self, reason: UserError) -> None:
        with self._changed:
            self._refused = self._refused or reason
            self._changed.notify_all()
