"""The hosts of an island: one host (`HostWorker`), and all of them as one object for the driver (`HostGroup`).

Each host has its shards, and exchanges them only with the same host of the other islands. A round is complete when all
hosts have completed it; its digest covers all hosts. The trainers of all hosts must launch the same programs in the
same order. So host 0 sends trainer commands and changes of the outer state in one stream, and all hosts apply each
command to the same outer state.

The stream goes over host 0's server. A host polls for commands that it does not have, and both sides number their
messages. So each message arrives once and in order, even after broken connections. If a process is lost,
`gregale.distributed.liveness` ends the others.

A `Follower` (host 1 or higher) executes the commands and decides nothing. Its trainer calls the same methods as the
trainer of host 0 calls on `Driver`, and receives the same commands and batches in the same order. If host 0 is lost, it
waits until `gregale.distributed.liveness` ends the process.
"""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import Queue
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.islands.network_reducer import Handle
from gregale.islands.outer import HostOuter, OuterView, Prepared, ValidatedState
from gregale.islands.protocol.messages import OuterRecord, Peer, Reduce, Timing
from gregale.islands.state import Expected, InnerOptimizerState
from gregale.islands.trainer_command import DeviceToHostCopy, RoundPacing, TrainerCommand, from_wire
from gregale.islands.transport.client import (
    Dial,
    PeerClient,
    PeerUnreachable,
    RequestRejected,
    ask_status,
    call,
    island_at,
)
from gregale.islands.transport.group import Count, Group, GroupFailed
from gregale.islands.transport.link_rate import LinkRate
from gregale.islands.transport.server import Server
from gregale.islands.transport.transfer import Fetcher, Snapshot, TransferFailed, VersionedArray
from gregale.methods.schedule import Schedule
from gregale.storage import digest

Messages = Mapping[str, np.ndarray]
COMMIT_SECONDS = 3.0  # from the end of a reduce to the view that commits it, as a joiner expects it


class OuterSnapshot(NamedTuple):
    """The outer state at one moment; `record`: None before the fleet starts."""

    record: OuterRecord | None
    moment: OuterView


class FetchedState(NamedTuple):
    """A valid fetched state: its record, and the digest of the arrays."""

    outer: OuterRecord
    digest: str
    settled: bool  # no round in progress would replace it


class DigestMismatch(TransferFailed):
    """The fetched arrays are complete, but do not form one state, or not the state of their record."""


class NotFinite(Exception):
    """The outer step of a round is not finite."""


class LocalLink:
    """The link of an island without peers."""

    size, rank = 1, 0

    def send(self, peer: int, data: np.ndarray, tag: int) -> Handle:
        raise AssertionError("a group of one sends nothing")

    recv = send


@dataclass
class HostWorker:
    """The part of a round that one host executes."""

    outer: HostOuter  # this host's shards of the outer parameters and of the outer optimizer state
    schedule: Schedule  # maps a round to its fragment
    server: Server  # serves this host's shards to peers
    token: bytes
    timing: Timing
    host: int = 0  # the index of this host in its island
    inner: Expected = field(default_factory=dict)  # shape and dtype of this host's shards of the inner optimizer
    count: Count = field(default_factory=Count)  # of the bytes of rounds and healing
    rate: LinkRate = field(default_factory=LinkRate)
    _record: OuterRecord | None = None
    _side: OuterSnapshot | None = None
    _fetcher: Fetcher | None = None
    _offered: ValidatedState | None = None  # the fetched state, if it is valid
    _inner: InnerOptimizerState | None = None  # the fetched shards of a peer's inner optimizer
    _taken: dict[int, Messages] = field(default_factory=dict)
    _results: dict[str, tuple[Prepared, bool]] = field(default_factory=dict)
    _group: tuple[tuple[Peer, ...], Group] | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def side(self) -> OuterSnapshot:
        """The outer state at the last command."""
        return self._side or OuterSnapshot(None, self.outer.now())

    def ordered(self, order: TrainerCommand | None) -> None:
        """Record the current outer state for the trainer's next command."""
        if order is not None:
            self._side = OuterSnapshot(self._record, self.outer.now())

    def store_messages(self, number: int, messages: Messages) -> None:
        """Store this host's messages of a round; delete those of another round."""
        self._taken = {self.schedule.round_fragment(number): messages}

    def reduce(self, action: Reduce, name: str) -> str:
        """Average a fragment, prepare its outer step, and return the new digest. Raises GroupFailed and NotFinite."""
        self.server.outer.expect(self.timing.reduce_seconds)
        try:
            digest = self._reduce(action, name)
        except (GroupFailed, NotFinite):
            self.server.outer.expect(0.0)
            raise
        self.server.outer.expect(COMMIT_SECONDS)
        return digest

    def _reduce(self, action: Reduce, name: str) -> str:
        names = [member.name for member in action.members]  # without sessions, which change at a restart
        rank, fragment = names.index(name), self.schedule.round_fragment(action.round)
        messages = self._taken.get(fragment) if action.weights[rank] > 0 else None
        group = json.dumps([*names, *action.parts])  # whose members keep errors of the rows that they average
        error, reducer = self.outer.error(fragment, group), self.outer.reducer(fragment)
        arguments = messages, action.weights
        try:
            if len(names) == 1:
                reduced = reducer.reduce(*arguments, LocalLink(), error, self.timing.reduce_seconds)
            else:
                link = self._joined(action.key, action.members, rank)
                with self.rate.measured(link.streams):
                    reduced = reducer.reduce(*arguments, link, error, self.timing.reduce_seconds, action.parts)
        except GroupFailed:
            self.drop_group()
            raise
        prepared = self.outer.prepare(fragment, reduced, group)
        if not prepared.finite:
            raise NotFinite(f"the outer step of round {action.round} is not finite")
        self._results[action.key] = prepared, messages is not None
        return prepared.digest

    def commit(self, key: str, outer: OuterRecord) -> None:
        prepared, is_used = self._results.pop(key)
        self.outer.commit(prepared, outer.round)
        self._results.clear()
        if is_used:
            self._taken.clear()
        self.publish(outer)

    def discard(self, key: str) -> None:
        self._results.pop(key, None)

    def meet(self, own: Sequence[str], others: Sequence[Sequence[str]], relay: str) -> None:
        peers = [hosts[self.host] for hosts in others if len(hosts) > self.host]
        self.server.paths.update(own[self.host], peers, relay)

    def drop_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group[1].drop()

    def publish(self, outer: OuterRecord) -> None:
        """Serve the current state under this record to healing islands."""
        self._record = outer
        facts = {"outer": outer.to_json()}
        self.server.outer.publish(Snapshot(outer.generation.number, outer.round, self.outer.leaves(), facts))

    def fetch(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch this host's shards of the state of peers; keep the own shards. Raises TransferFailed."""
        if self._fetcher is None:
            expected = {name: (shape, dtype) for name, (dtype, shape) in self.outer.expected().items()}
            held = {name: leaf.array for name, leaf in self.outer.leaves().items()}
            self._fetcher = Fetcher(self.token, expected, held, self.server.paths.dial)
        addresses = [source.hosts[self.host] for source in sources]
        manifest = "/manifest/settled" if settled else "/manifest"
        fetched = self._fetcher.fetch(addresses, self.timing.heal_seconds, manifest)
        self.count.received += fetched.received_bytes
        try:
            self._offered = self.outer.check(fetched.arrays, fetched.offer.versions)
            record = OuterRecord.from_json(fetched.offer.facts.get("outer"))
            return FetchedState(record, self._offered.digest, fetched.settled)
        except ValueError as error:
            raise DigestMismatch(f"{', '.join(addresses)} sent an invalid state: {error}") from None

    def install(self, outer: OuterRecord) -> None:
        assert self._offered is not None
        self.outer.take_over(self._offered)
        self._offered = None
        self._end_fetching()
        self._results.clear()
        self._taken.clear()
        self.publish(outer)

    def show(self, inner: InnerOptimizerState) -> None:
        leaves = {name: VersionedArray(array, inner.step) for name, array in inner.arrays.items()}
        self.server.inner.publish(Snapshot(0, inner.step, leaves))

    def inherit(self, source: str) -> int:
        """Fetch the inner optimizer's shards from a peer's host; return its step count. Raises TransferFailed."""
        self._inner = None
        with closing(Fetcher(self.token, self.inner, dial=self.server.paths.dial)) as fetcher:
            fetched = fetcher.fetch([source], self.timing.heal_seconds, "/manifest/inner")
        self._inner = InnerOptimizerState(fetched.offer.round, fetched.arrays)
        return fetched.offer.round

    def inherited(self) -> InnerOptimizerState | None:
        inner, self._inner = self._inner, None
        return inner

    def _joined(self, key: str, members: tuple[Peer, ...], rank: int) -> Group:
        """Return the group of these members: the current one, or a new one."""
        with self._lock:
            if self._group is not None and self._group[0] == members and not self._group[1].failure:
                return self._group[1]
        self.drop_group()
        addresses, names = zip(*((member.hosts[self.host], member.name) for member in members), strict=True)
        group = Group(key, rank, addresses, self.server, names)
        group.count = self.count
        with self._lock:
            self._group = (members, group)  # before it connects, so that `drop_group` can end that
        group.connect(self.timing.reduce_seconds)
        return group

    def _end_fetching(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def close(self) -> None:
        self._end_fetching()
        self.drop_group()
        self.server.close()


LARGEST_REPLY_BYTES = 64 << 20
ASK_SECONDS = 20.0  # for which host 0 holds a request while it has no command
REACH_SECONDS, RETRY_SECONDS, CLOSE_SECONDS = 10.0, 0.1, 2.0


ERRORS = {kind.__name__: kind for kind in (GroupFailed, NotFinite, TransferFailed, DigestMismatch)}


class RemoteHost:
    """Another host of the island, as seen from host 0; `number`: the process index of the host."""

    def __init__(self, number: int):
        self.number, self._changed = number, Condition()
        self._queue: list[dict[str, Any]] = []  # commands that the host may not have received
        self._acknowledged = 0  # the number of commands before those
        self._received = 0  # the number of messages received from the host
        self._message_count, self._copied_step, self._is_closed = 0, -1, False
        self._answers: dict[int, tuple[Future[dict[str, Any]], Callable[[], None]]] = {}
        self._numbers = itertools.count()

    def send(self, command: str, arguments: list[Any], **more: Any) -> None:
        """Queue a command that has no answer; commands run in call order."""
        with self._changed:
            self._queue.append({"do": command, "with": arguments, **more})
            self._changed.notify_all()

    def request(
        self, command: str, arguments: list[Any], failed: Callable[[], None] = lambda: None
    ) -> Future[dict[str, Any]]:
        """Queue a command that the host runs in its own thread; the future receives the answer or the error.

        - `failed`: called in another thread before the future fails
        """
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        self._answers[number] = answer, failed
        self.send(command, arguments, ask=number)
        return answer

    def await_messages(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._message_count or self._is_closed)
            self._message_count -= 1

    def await_copy(self, step: int, seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._copied_step >= step, seconds):
                raise RequestRejected(f"host {self.number} has not copied its inner optimizer in time")

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return commands that the host does not have, waiting for one; or handle the host's message."""
        if "have" in message:
            return {"told": self._after(message["have"])}
        with self._changed:
            if message["number"] != self._received:  # a duplicate: the reply was lost
                return {}
            self._received += 1
            self._message_count += "took" in message
            self._copied_step = message.get("shown", self._copied_step)
            self._changed.notify_all()
        if "ask" in message:
            answer, failed = self._answers.pop(message["ask"])
            if "failed" in message:
                failed()
                text = f"host {self.number} of this island: {message['failed']}"
                answer.set_exception(ERRORS[message["error"]](text))
            else:
                answer.set_result(message)
        return {}

    def close(self) -> None:
        """Wait until the host has all commands, then release every waiting thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, CLOSE_SECONDS)
            self._is_closed = True
            self._changed.notify_all()

    def _after(self, have: int) -> list[dict[str, Any]]:
        with self._changed:
            del self._queue[: max(have - self._acknowledged, 0)]
            self._acknowledged = max(have, self._acknowledged)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._is_closed, ASK_SECONDS)
            return list(self._queue) if have == self._acknowledged else []


class HostConnection:
    """The connection of host `number` to host 0; any thread may send, one receives. Raises UserError if it fails."""

    def __init__(self, address: str, token: bytes, number: int):
        self._address, self._token, self._number = address, token, number
        self._sent, self._count, self._lock, self._is_closed = 0, 0, Lock(), False
        self._sends, self._receives = (PeerClient(address, token, REACH_SECONDS) for _ in range(2))
        try:
            ask_status(address, token, REACH_SECONDS)
        except (PeerUnreachable, RequestRejected) as error:
            raise UserError(
                f"host {number} of this island cannot reach host 0 ({error}): set islands.bind of process 0 to an "
                "address that its other hosts reach, and give all of them the same token."
            ) from None

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._request(self._sends, {"number": self._sent, **message}, REACH_SECONDS)
            self._sent += 1

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the next commands, possibly none; None after `close`."""
        commands = self._request(self._receives, {"have": self._count}, ASK_SECONDS + REACH_SECONDS).get("told", [])
        self._count += len(commands)
        if self._is_closed:
            self._receives.close()
            return None
        return commands

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            self._sends.close()

    def _request(self, peer: PeerClient, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        body = canonical({"kind": "host", "name": island_at(self._address), "host": self._number, **message})
        while not self._is_closed:
            try:
                return peer.request("POST", "/message", body, LARGEST_REPLY_BYTES, seconds)
            except (PeerUnreachable, RequestRejected):
                time.sleep(RETRY_SECONDS)
        return {}


HEAL_TRIES = 5
"""How often hosts fetch again when their peers serve different rounds."""
COPY_SECONDS = 30.0  # limit for a trainer to finish its step and copy its inner optimizer
COPY_TRIES = 2  # per source: a request of another joiner may have replaced the copies of some hosts meanwhile


class HostGroup:
    """All hosts of an island. One thread at a time calls it, except `drop_group`, `ordered`, `granted` and `meet`.

    - `others`: the other hosts, by number
    - `wants_inner`: this island has no usable inner optimizer of its own
    """

    def __init__(self, own: HostWorker, others: Sequence[RemoteHost] = (), wants_inner: bool = False):
        self.timing, self.count = own.timing, own.count
        self.wants_inner, self._has_inner = wants_inner, False
        self._own, self._others = own, others
        self._met: tuple[Any, ...] = ()

    @property
    def side(self) -> OuterSnapshot:
        return self._own.side

    @property
    def link(self) -> int:
        """Return the level of the rate of host 0's link; 0: unknown. The links of the other hosts count as equal."""
        return self._own.rate.level

    @property
    def dial(self) -> Dial:
        return self._own.server.paths.dial

    def meet(self, name: str, addresses: Mapping[str, tuple[str, ...]], relay: str) -> None:
        met = addresses.get(name, ()), [hosts for other, hosts in addresses.items() if other != name], relay
        if met != self._met and len(met[0]) > len(self._others):
            self._met = met
            self._own.meet(*met)
            self._send("meet", *met)

    def ordered(self, order: TrainerCommand | None) -> None:
        self._own.ordered(order)
        self._send("ordered", None if order is None else [type(order).__name__, *order])

    def granted(self, first: int | None) -> None:
        """Send the first example of the next batch to all hosts (None: no example is leased)."""
        self._send("granted", first)

    def store_messages(self, number: int, messages: Messages) -> None:
        self._own.store_messages(number, messages)
        for host in self._others:
            host.await_messages()

    def reduce(self, action: Reduce, name: str) -> str:
        """Average a fragment, prepare its outer step, return the digest of all hosts. Raises GroupFailed, NotFinite."""
        members = [list(member) for member in action.members]
        arguments = [action.key, action.round, members, list(action.weights), list(action.parts), name]
        asked = [host.request("reduce", arguments, failed=self.drop_group) for host in self._others]
        failures: list[Exception] = []
        digests = [self._attempt(lambda: self._own.reduce(action, name), failures)]
        if failures and isinstance(failures[0], GroupFailed):
            self.drop_group()  # otherwise the others would wait for their timeout
        digests += [self._attempt(lambda answer=answer: self._value_of(answer), failures) for answer in asked]
        if failures:
            self.discard(action.key)
            raise failures[0]
        return joint_digest(digests)

    def commit(self, key: str, outer: OuterRecord) -> None:
        self._own.commit(key, outer)
        self._send("commit", key, outer.to_json())

    def discard(self, key: str) -> None:
        self._own.discard(key)
        self._send("discard", key)

    def drop_group(self) -> None:
        self._send("drop_group")
        self._own.drop_group()

    def publish(self, outer: OuterRecord) -> None:
        self._own.publish(outer)
        self._send("publish", outer.to_json())

    def heal(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch the state of peers without replacing the own state. Raises TransferFailed.

        Chunks have hashes, but the source computes them from its present memory. The digest in the record was agreed
        when the fleet committed the round, over the arrays of all hosts. It detects a source whose memory has changed
        since. Then each source is tried alone.

        - `settled`: wait a few seconds for the end of the round that the peers are making
        """
        until = time.monotonic() + self.timing.heal_seconds
        try:
            return self._fetch(sources, settled)
        except DigestMismatch as error:
            complaints = [str(error)]
        for source in sources if len(sources) > 1 else ():
            if time.monotonic() >= until:
                break
            try:
                return self._fetch([source], settled)
            except TransferFailed as error:
                complaints.append(str(error))
        raise TransferFailed("; ".join(complaints))

    def _fetch(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch the state of peers, with the same record on all hosts, and check its digest. Raises TransferFailed."""
        wire = [list(source) for source in sources]
        found: dict[int, FetchedState] = {}
        for _ in range(HEAL_TRIES):
            newest = max((each.outer for each in found.values()), key=lambda outer: outer.round, default=None)
            current = {number for number, each in found.items() if each.outer == newest}
            behind = set(range(len(self._others) + 1)) - current
            asked = [
                (host.number, host.request("fetch", [wire, settled])) for host in self._others if host.number in behind
            ]
            if 0 in behind:
                found[0] = self._own.fetch(sources, settled)
            for number, answer in asked:
                record, digest, is_settled = self._value_of(answer)
                found[number] = FetchedState(OuterRecord.from_json(record), digest, is_settled)
            if all(each.outer == found[0].outer for each in found.values()):
                outer, digest = found[0].outer, joint_digest([each.digest for _, each in sorted(found.items())])
                if digest != outer.digest:
                    names = ", ".join(source.name for source in sources)
                    raise DigestMismatch(
                        f"the arrays of round {outer.round} of {names} have the digest {digest}, their record has "
                        f"{outer.digest}"
                    )
                return FetchedState(outer, digest, all(each.settled for each in found.values()))
        rounds = sorted({each.outer.round for each in found.values()})
        raise DigestMismatch(f"the hosts of this island fetched different states, of rounds {rounds}")

    def install(self, outer: OuterRecord) -> bool:
        """Adopt the fetched state, and serve it; return as `takes_inner`."""
        self._own.install(outer)
        self._send("install", outer.to_json())
        return self.takes_inner()

    def inherit(self, sources: Sequence[Peer]) -> None:
        """Fetch a peer's inner optimizer if it is wanted: for all hosts, or for none."""
        self._has_inner = False
        self._has_inner = self.wants_inner and any(self._inherit(source) for source in sources)

    def _inherit(self, source: Peer) -> bool:
        """Return whether all hosts have the shards of their counterparts, copied after the same step."""
        for _ in range(COPY_TRIES):
            try:
                call(source.hosts[0], self._own.token, {"kind": "inner"}, COPY_SECONDS, self.dial)
                asked = [host.request("inherit", [source.hosts[host.number]]) for host in self._others]
                steps = {self._own.inherit(source.hosts[0]), *(self._value_of(answer) for answer in asked)}
            except (PeerUnreachable, RequestRejected, TransferFailed):
                return False
            if len(steps) == 1:
                return True
        return False

    def takes_inner(self) -> bool:
        """Return whether the trainers adopt the fetched inner optimizer with the next command."""
        has_inner, self._has_inner = self._has_inner, False
        self.wants_inner = self.wants_inner and not has_inner
        return has_inner

    def show(self, inner: InnerOptimizerState) -> None:
        self._own.show(inner)

    def await_copies(self, step: int) -> None:
        for host in self._others:
            host.await_copy(step, COPY_SECONDS)

    def inherited(self) -> InnerOptimizerState | None:
        return self._own.inherited()

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        for host in self._others:
            if host.number == message.get("host"):
                return host.handle(message)
        raise RequestRejected("this island has no such host")

    def close(self) -> None:
        for host in self._others:
            host.close()
        self._own.close()

    def _send(self, command: str, *arguments: Any) -> None:
        for host in self._others:
            host.send(command, list(arguments))

    def _value_of(self, answer: Future[dict[str, Any]]) -> Any:
        """Return the value of a host's answer, or raise its error; add its bytes to the island's count."""
        result = answer.result()
        self.count.sent += result["sent"]
        self.count.received += result["received"]
        return result["value"]

    @staticmethod
    def _attempt(work: Callable[[], str], failures: list[Exception]) -> str:
        try:
            return work()
        except (GroupFailed, NotFinite) as error:
            failures.append(error)
            return ""


def joint_digest(digests: Sequence[str]) -> str:
    """Return the digest of an island's host digests in host order; for one host, its own digest."""
    if len(digests) == 1:
        return digests[0]
    return digest("".join(digests).encode())


class Recovery:
    """Restarts of a trainer whose island has diverged.

    - `restart(inherits)`: restarts the trainer with the inherited inner optimizer, or with its own
    - `is_tried`: whether the trainer was restarted since the island's last contribution
    - `in_thread`: runs slow work in a thread
    """

    def __init__(
        self, worker: HostGroup, restart: Callable[[bool], None], in_thread: Callable[[Callable[[], None]], object]
    ):
        self._worker, self._restart, self._in_thread = worker, restart, in_thread
        self.is_tried = self._has_inherited = False

    def contributed(self) -> None:
        """Note that the island has contributed to a round: its message was no outlier."""
        self.is_tried = self._has_inherited = False

    def begin(self, peers: Sequence[Peer]) -> None:
        """Restart the island, which has diverged, from the state of `peers`, which have not.

        The island inherits only once before its next contribution, because each copy interrupts a peer.
        """
        self.is_tried = True
        self._restart(False)
        if peers and not self._has_inherited:
            self._has_inherited = self._worker.wants_inner = True
            self._in_thread(lambda: self._inherit(peers))

    def _inherit(self, peers: Sequence[Peer]) -> None:
        self._worker.inherit(peers)
        if self._worker.takes_inner():
            self._restart(True)


class Follower:
    """A host that receives commands from host 0 through `link` and passes them to this host's `worker`."""

    def __init__(self, worker: HostWorker, link: HostConnection, pace: RoundPacing):
        self.pace, self.side = pace, worker.side
        self._worker, self._link = worker, link
        self._orders: Queue[tuple[TrainerCommand | None, OuterSnapshot] | UserError] = Queue()
        self._grants: Queue[int | None] = Queue()
        threads = (ThreadPoolExecutor(1, name) for name in ("copying", "exchange", "healing"))
        self._copying, self._exchange, self._healing = threads
        self._is_closed = False

    def start(self) -> None:
        Thread(target=lambda: self._guarded(self._listen), daemon=True, name="follower").start()

    # Methods that the trainer calls, as on a driver.

    def order(self, starved: bool = False) -> TrainerCommand | None:
        del starved
        found = self._orders.get()
        if isinstance(found, UserError):
            raise found
        order, self.side = found
        return order

    def take(self) -> int | None:
        return self._grants.get()

    def message_sent(self, number: int, fetch_down: Callable[[], DeviceToHostCopy], used: int) -> None:
        del used

        def store(found: DeviceToHostCopy) -> None:
            self._worker.store_messages(number, found.messages)
            self._link.send({"took": True})

        def down() -> None:  # not in the thread of reduces, as on host 0
            self._exchange.submit(self._guarded, partial(store, fetch_down()))

        self._copying.submit(self._guarded, down)

    is_early = False
    """Host 0 waits for the end of a step if messages are handed over early, and the others for its commands."""

    def stepped(self) -> None:
        """Do nothing: host 0 counts the steps."""

    def to_save(self, batches: int) -> dict[str, Any]:
        del batches
        return {"steps": 0, "holder": "", "used": 0}

    def used(self, batches: int) -> int:
        del batches
        return 0

    def shown(self, inner: InnerOptimizerState) -> None:
        self._worker.show(inner)
        self._link.send({"shown": inner.step})

    def inherited(self) -> InnerOptimizerState | None:
        return self._worker.inherited()

    def diverged(self) -> bool:
        return False

    def leave(self) -> None:
        """Do nothing: host 0 leaves, and a `Finish` command follows."""

    def confirm(self) -> None:
        """Do nothing: host 0 waits."""

    def close(self) -> None:
        self._is_closed = True
        self._link.close()
        for threads in (self._copying, self._exchange, self._healing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    # Commands of host 0.

    def _listen(self) -> None:
        for message in chain.from_iterable(iter(self._link.receive, None)):
            arguments = message["with"]
            match message["do"]:
                case "ordered":
                    order = from_wire(arguments[0])
                    self._worker.ordered(order)
                    self._orders.put((order, self._worker.side))
                case "granted":
                    self._grants.put(arguments[0])
                case "reduce":
                    self._exchange.submit(self._guarded, partial(self._answer, message, self._reduce))
                case "fetch":
                    self._healing.submit(self._guarded, partial(self._answer, message, self._fetch))
                case "inherit":
                    self._healing.submit(self._guarded, partial(self._answer, message, self._worker.inherit))
                case "commit":
                    self._worker.commit(arguments[0], OuterRecord.from_json(arguments[1]))
                case "install":
                    self._worker.install(OuterRecord.from_json(arguments[0]))
                case "publish":
                    self._worker.publish(OuterRecord.from_json(arguments[0]))
                case "discard":
                    self._worker.discard(arguments[0])
                case "meet":
                    self._worker.meet(*arguments)
                case "drop_group":
                    self._worker.drop_group()

    def _reduce(self, key: str, number: int, members: list, weights: list[float], parts: list[int], name: str) -> str:
        return self._worker.reduce(Reduce(key, number, _peers(members), tuple(weights), tuple(parts)), name)

    def _fetch(self, sources: list, settled: bool) -> Any:
        found = self._worker.fetch(_peers(sources), settled)
        return found.outer.to_json(), found.digest, found.settled

    def _answer(self, message: dict[str, Any], work: Callable[..., Any]) -> None:
        count = self._worker.count
        before = count.sent, count.received
        try:
            value = work(*message["with"])
        except (GroupFailed, NotFinite, TransferFailed) as error:
            self._link.send({"ask": message["ask"], "failed": str(error), "error": type(error).__name__})
            return
        sent, received = count.sent - before[0], count.received - before[1]
        self._link.send({"ask": message["ask"], "value": value, "sent": sent, "received": received})

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`; an error in a thread ends the run, because otherwise the run would wait forever."""
        try:
            work()
        except BaseException as error:
            if not self._is_closed:
                self._orders.put(UserError(f"islands: {type(error).__name__}: {error}"))
                raise


def _peers(wire: list) -> tuple[Peer, ...]:
    return tuple(Peer(name, session, tuple(hosts)) for name, session, hosts in wire)
