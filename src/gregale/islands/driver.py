"""The driver of an island: converts observations to protocol events and carries out the protocol's actions.

Between steps the trainer requests a command (`order`). It waits for the network only where the method requires that.
Slow work runs in threads: view requests (only the answer to the newest one counts), exchange, healing, messages to
peers.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from threading import Condition, Event, Lock, RLock, Thread, current_thread
from typing import Any

from gregale.errors import UserError
from gregale.islands import trainer_command as commands
from gregale.islands.hosts import COPY_SECONDS, FetchedState, HostGroup, NotFinite, OuterSnapshot, Recovery
from gregale.islands.protocol import messages as protocol
from gregale.islands.protocol.decision import distances
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import (
    NO_ROUND,
    Columns,
    GarbageError,
    Header,
    OuterRecord,
    Peer,
    View,
    decode_all,
    unpack,
)
from gregale.islands.protocol.stalls import RunningTime, Stalls
from gregale.islands.protocol.trainer_side import TrainerSide
from gregale.islands.state import DataLeases, InnerOptimizerState
from gregale.islands.transport.client import (
    OUTWARDS,
    Dial,
    PeerUnreachable,
    RequestRejected,
    ask_status,
    call,
    island_at,
)
from gregale.islands.transport.coordinator import (
    LAST_REQUEST_SECONDS,
    CoordinatorClient,
    CoordinatorRefuses,
    CoordinatorUnreachable,
    NotAdmitted,
    RequestDropped,
)
from gregale.islands.transport.group import Count, GroupFailed
from gregale.islands.transport.lighthouse import NAME as LIGHTHOUSE
from gregale.islands.transport.transfer import TransferFailed


class ViewPoller:
    """A sender of view requests, each in a thread of its own; views go to `seen`, failures to `failed`.

    A new request does not wait for the answer to the previous one, which is ignored: the coordinator drops the old
    request. Otherwise the next view would contain the outdated header of a healed member.

    - `complain`: receives one line for each unreadable member of a view, and one for a coordinator that refuses
    - `refused`: receives the reason why the coordinator does not admit this island, which ends
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        seen: Callable[[View], None],
        failed: Callable[[str], None],
        complain: Callable[[str], None],
        refused: Callable[[NotAdmitted], None],
    ):
        self._coordinator = coordinator
        self._seen, self._failed, self._complain, self._refused = seen, failed, complain, refused
        self._complaints: set[str] = set()  # of the last answer
        self._threads: list[Thread] = []
        self._newest: Thread | None = None  # None: its answer does not count any more
        self._lock, self._closed = Lock(), False

    def ask(self, header: Header, needed: int) -> None:
        with self._lock:
            if self._closed:
                return
            thread = Thread(target=self._request, args=(header, needed), daemon=True, name="asking")
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            self._newest = thread
            thread.start()

    def look(self) -> None:
        """Give up the request that waits for an answer, if another coordinator is chosen now."""
        if address := self._coordinator.turned_to():
            with self._lock:
                self._newest = None
            self._complain(f"requests go to the lighthouse at {address} now")
            self._failed("another coordinator is chosen")

    def close(self) -> None:
        """Stop requesting, and leave. Wait briefly for requests in progress."""
        with self._lock:
            self._closed = True
        self._coordinator.close()
        until = time.monotonic() + LAST_REQUEST_SECONDS
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _request(self, header: Header, needed: int) -> None:
        try:
            reply = self._coordinator.ask(asdict(header), needed)
        except NotAdmitted as error:
            self._refused(error)
        except (CoordinatorUnreachable, RequestDropped) as error:
            if self._is_newest():
                self._tell({"": str(error)} if isinstance(error, CoordinatorRefuses) else {})
                self._failed(str(error))
        else:
            if self._is_newest():
                self._answered(*reply)

    def _is_newest(self) -> bool:
        with self._lock:
            return not self._closed and self._newest is current_thread()

    def _answered(self, number: int, columns: Columns, stamp: int) -> None:
        found = [with_own_addresses(each) for each in decode_all(Header, columns, "header")]
        named = zip(unpack(columns, "name"), found, strict=True)
        self._tell({name: f"{name}: {error}" for name, error in named if isinstance(error, GarbageError)})
        self._seen(View(number, tuple(each for each in found if isinstance(each, Header)), stamp))

    def _tell(self, complaints: dict[str, str]) -> None:
        for kind, complaint in complaints.items():
            if kind not in self._complaints:
                self._complain(complaint)
        self._complaints = set(complaints)


def with_own_addresses(header: Header | GarbageError) -> Header | GarbageError:
    """Return the header, or an error if an address in it is another island's: its messages would go there."""
    if isinstance(header, Header) and not {island_at(host) for host in header.hosts} <= {"", header.name}:
        return GarbageError("a header has the address of another island")
    return header


class RoundLog:
    """The log of one island. It measures the current round, and passes a finished one to `record`, for rounds.jsonl.

    - `count`: bytes sent and received so far
    - `members`: the names of the members of the newest round
    """

    def __init__(self, count: Count, record: Callable[[dict[str, Any]], None]):
        self._count, self._record = count, record
        self._began: float | None = None
        self._sent = self._received = 0  # bytes until then
        self._waiting = 0.0  # seconds since then
        self._waits_since: float | None = None
        self.members: tuple[str, ...] = ()

    def save_offset(self, name: str) -> float:
        """Return an island's position among the members of the newest round, in [0, 1): it staggers checkpoints."""
        return self.members.index(name) / len(self.members) if name in self.members else 0.0

    def begin(self) -> None:
        """Note the start of a round, or of healing."""
        self._began, self._waiting = time.time(), 0.0
        self._sent, self._received = self._count.sent, self._count.received

    def wait_begins(self) -> None:
        self._waits_since = time.time()

    def wait_ends(self) -> None:
        self._count_waiting()
        self._waits_since = None

    def _count_waiting(self) -> None:
        if self._waits_since is None:
            return
        now = time.time()
        if self._began is not None:
            self._waiting += now - max(self._waits_since, self._began)
        self._waits_since = now

    def end(self, outer: OuterRecord, weight: float, healed: bool = False) -> None:
        """Record a committed state, with `weight` contributed tokens, or a state fetched from a peer."""
        self._count_waiting()
        if self._began is None:
            self.begin()
        now = time.time()
        began, self._began = self._began or now, None
        self._record(
            {
                "round": outer.round,
                "generation": outer.generation.number,
                "digest": outer.fingerprint(),
                "members": list(self.members),
                "weight": weight,
                "began": began,
                "ended": now,
                "seconds": now - began,
                "waiting_seconds": self._waiting,
                "bytes_sent": self._count.sent - self._sent,
                "bytes_received": self._count.received - self._received,
                "healed": healed,
            }
        )


FIND_SECONDS = 2.0
TELL_SECONDS = 2.0
PAUSE_SECONDS = 0.1  # between two probes of a peer that refuses connections


def dead_peers(peers: Iterable[Peer]) -> frozenset[str]:
    """Return the identities of the peers whose host refuses a connection: the host runs, the process does not.

    A peer that does not answer may be cut off or paused, so it does not count as dead.
    """
    asked = list(peers)
    with ThreadPoolExecutor(len(asked) or 1) as threads:
        refused = threads.map(_is_refused, [peer.hosts[0] for peer in asked])
        return frozenset(compress((peer.identity for peer in asked), refused))


def _is_refused(address: str) -> bool:
    if address.startswith(OUTWARDS):
        return False
    host, _, port = address.partition("/")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), FIND_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class PeerProbe:
    """A `with` block that probes peers, and calls `drop` if one is silent for `seconds`.

    A group's sockets do not report a peer that is cut off. A busy server answers late, or closes a connection that has
    waited too long. So a probe is repeated until it has taken three quarters of `seconds`. The first probes are sent
    during the first quarter, one after the other.

    - `peers`: addresses by name
    - `silent`: the names of the peers that did not answer
    - `dial`: as of `PeerClient`
    """

    def __init__(
        self, peers: Mapping[str, str], token: bytes, seconds: float, drop: Callable[[], None], dial: Dial | None = None
    ):
        self._peers, self._token, self._quarter, self._drop, self._dial = peers, token, seconds / 4, drop, dial
        self._over = Event()
        self.silent: list[str] = []

    def reason(self) -> str:
        return f"{' and '.join(self.silent)} did not answer" if self.silent else ""

    def __enter__(self) -> "PeerProbe":
        for place, (name, address) in enumerate(self._peers.items(), 1):
            first = self._quarter * place / len(self._peers)
            Thread(target=self._watch, args=(name, address, first), daemon=True, name=f"watching-{name}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self, name: str, address: str, pause: float) -> None:
        silent_at = None  # the end of the current probe, once a try has failed
        while not self._over.wait(pause):
            until = silent_at or time.monotonic() + 3 * self._quarter
            try:
                with suppress(RequestRejected):  # the peer is alive
                    ask_status(address, self._token, max(until - time.monotonic(), PAUSE_SECONDS), self._dial)
                silent_at, pause = None, self._quarter
            except PeerUnreachable:
                silent_at, pause = until, PAUSE_SECONDS
                if time.monotonic() >= until and not self._over.is_set():
                    self.silent.append(name)
                    self._drop()
                    return


class LatestWork(ThreadPoolExecutor):
    """Threads for work by key: one piece at a time for each key, and the newest replaces a piece that waits."""

    def __init__(self, threads: int, name: str):
        super().__init__(threads, name)
        self._guard = Lock()
        self._latest: dict[str, Any] = {}  # the work that waits, by each key that has work; None: the only one runs

    def put(self, key: str, work: Callable[[], object]) -> None:
        with self._guard:
            is_new, self._latest[key] = key not in self._latest, work
            if is_new:
                self.submit(self._run, key)

    def _run(self, key: str) -> None:
        with self._guard:
            work, self._latest[key] = self._latest[key], None
        try:
            work()
        finally:
            with self._guard, suppress(RuntimeError):  # after `shutdown`
                if self._latest[key] is None:
                    del self._latest[key]
                else:
                    self.submit(self._run, key)  # behind the work of other keys


def newest(heal: Callable[[bool], FetchedState], waits: bool, seconds: float) -> OuterRecord:
    """Return the record of a fetched state that no round in progress would replace.

    Fetching the state of a large model may take longer than a round. The first call of `heal` fetches most of it. Each
    later one fetches only changes, after the end of a round, so an island joins between two rounds. Raises the errors
    of `heal`.

    - `heal(settled)`: fetches the state of peers; `settled`: after the round that they are making
    - `waits`: the first call also waits for the end of a round, because a round changes the whole state
    - `seconds`: the time after which a state is accepted although a round may replace it
    """
    until = time.monotonic() + seconds
    heal(waits)
    while True:
        found = heal(True)
        if found.settled or time.monotonic() >= until:
            return found.outer


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
        with self._lock:
            first = self.leases.take()
            self.worker.granted(first)
            return first

    def used(self, batches: int) -> int:
        return self.leases.used_after(batches)

    def to_save(self, batches: int) -> dict[str, Any]:
        """Return the values of a checkpoint after this process's first `batches` batches.

        - `steps`: the number of steps that no round in the parameters includes
        - `holder`: the session that holds the leases; `used`: the number of examples that it has used
        """
        with self._lock:
            return {"steps": self._trainer.undecided_steps, "holder": self.leases.holder, "used": self.used(batches)}

    def message_sent(self, number: int, fetch_down: Callable[[], commands.DeviceToHostCopy], used: int) -> None:
        """Accept the message of a round; `fetch_down` waits until the message is on the host."""
        with self._lock:
            count, began = self._trainer.message_sent(number, self._time()), self._time()
            self._log.begin()

        def store(found: commands.DeviceToHostCopy) -> None:
            self.worker.store_messages(number, found.messages)
            with self._lock:
                self._trainer.copied(self._time() - began)
                if count == self.member.handover.count:  # otherwise the message is obsolete
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
        self.worker.show(inner)
        with self._changed:
            self._is_copy_wanted, self._copied_step = False, inner.step
            self._changed.notify_all()

    def inherited(self) -> InnerOptimizerState | None:
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
                    self._announcing.put(address, partial(self._announce, address, number))
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
                self.report(f"healed: this island has the outer state of round {outer.round} from its peers", False)
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

    def _announce(self, address: str, number: int) -> None:
        """Announce to a peer that a round is due. A lost announcement is not repeated here."""
        with suppress(PeerUnreachable, RequestRejected):
            call(address, self.token, {"kind": "due", "round": number}, TELL_SECONDS, self.worker.dial)

    def _reduce(self, action: protocol.Reduce) -> None:
        own, members = self.member.identity.name, action.members
        self._log.members = tuple(member.name for member in members)
        place, count = self._log.members.index(own), len(members)
        # A round that has failed is tried again with probes of all, because the protocol leaves silent ones out.
        probed = range(1, count) if self.member.header.failures else distances(count)
        others = {peer.name: peer.hosts[0] for peer in (members[(place + each) % count] for each in probed)}
        seconds, worker = self.member.timing.heartbeat_seconds, self.worker
        watch = PeerProbe(others, self.token, seconds, worker.drop_group, worker.dial)
        try:
            with watch:
                event = protocol.Reduced(action.key, worker.reduce(action, own))
        except NotFinite:
            event = protocol.ReduceFailed(action.key, overflowed=True)
        except GroupFailed as error:
            self.report(f"Round {action.round} is tried again: {watch.reason() or error}", False)
            event = protocol.ReduceFailed(action.key, tuple(watch.silent))
        self.post(event)

    def _heal(self, action: protocol.Heal) -> None:
        """Fetch the state of peers, with their inner optimizer if it is wanted."""
        with self._lock:
            self._log.begin()
        began, worker, sources = time.monotonic(), self.worker, action.sources
        is_whole = self.pace.schedule.fragments == 1  # then a round changes the whole state
        try:
            outer = newest(lambda settled: worker.heal(sources, settled), is_whole, worker.timing.reduce_seconds)
            worker.inherit(sources)
            event = protocol.Healed(outer)
        except TransferFailed as error:
            event = protocol.HealFailed(str(error))
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
