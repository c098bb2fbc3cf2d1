"""One host of an island: its shards of the outer state, the group with its counterparts, and its server.

A driver commands it; it makes no decisions. One thread at a time calls it, except for `drop_group`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from gregale.communication.network import Handle
from gregale.islands.inner_optimizer_state import Expected, InnerOptimizerState
from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.protocol.messages import Reduce
from gregale.islands.trainer_command import TrainerCommand
from gregale.islands.transport.group import Count, Group, GroupFailed
from gregale.islands.transport.link_rate import LinkRate
from gregale.islands.transport.server import Server
from gregale.islands.transport.snapshot_store import ServedArray, Snapshot
from gregale.islands.transport.transfer import Fetcher, TransferFailed
from gregale.methods.island_outer import HostOuter, OuterView, Prepared, ValidatedState
from gregale.methods.schedule import Schedule

Messages = Mapping[str, np.ndarray]
COMMIT_SECONDS = 3.0  # from the end of a reduce to the view that commits it, as a joiner expects it


class Timeouts(NamedTuple):
    """Limits for waiting for other hosts, in seconds."""

    reduce: float
    heal: float


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
    timeouts: Timeouts
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
        self.server.outer.expect(self.timeouts.reduce)
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
                reduced = reducer.reduce(*arguments, LocalLink(), error, self.timeouts.reduce)
            else:
                link = self._joined(action.key, action.members, rank)
                with self.rate.measured(link.streams):
                    reduced = reducer.reduce(*arguments, link, error, self.timeouts.reduce, action.parts)
        except GroupFailed:
            self.drop_group()
            raise
        prepared = self.outer.prepare(fragment, reduced, group)
        if not prepared.finite:
            raise NotFinite(f"the outer step of round {action.round} is not finite")
        self._results[action.key] = prepared, messages is not None
        return prepared.digest

    def commit(self, key: str, outer: OuterRecord) -> None:
        """Commit a result, and serve it."""
        prepared, is_used = self._results.pop(key)
        self.outer.commit(prepared, outer.round)
        self._results.clear()
        if is_used:
            self._taken.clear()
        self.publish(outer)

    def discard(self, key: str) -> None:
        self._results.pop(key, None)

    def meet(self, own: Sequence[str], others: Sequence[Sequence[str]], relay: str) -> None:
        """Follow the addresses of a view: of this island's hosts, of the others' hosts, and of the coordinator."""
        peers = [hosts[self.host] for hosts in others if len(hosts) > self.host]
        self.server.paths.update(own[self.host], peers, relay)

    def drop_group(self) -> None:
        """Drop the group; all its other members notice immediately."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group[1].drop()

    def publish(self, outer: OuterRecord) -> None:
        """Serve the current state under this record to healing islands."""
        self._record = outer
        leaves = {name: ServedArray(held.array, held.version) for name, held in self.outer.leaves().items()}
        self.server.outer.publish(Snapshot(outer.generation.number, outer.round, leaves, {"outer": outer.to_json()}))

    def fetch(self, sources: Sequence[Peer], settled: bool) -> FetchedState:
        """Fetch this host's shards of the state of peers; keep the own shards. Raises TransferFailed."""
        if self._fetcher is None:
            expected = {name: (shape, dtype) for name, (dtype, shape) in self.outer.expected().items()}
            held = {name: leaf.array for name, leaf in self.outer.leaves().items()}
            self._fetcher = Fetcher(self.token, expected, held, self.server.paths.dial)
        addresses = [source.hosts[self.host] for source in sources]
        manifest = "/manifest/settled" if settled else "/manifest"
        fetched = self._fetcher.fetch(addresses, self.timeouts.heal, manifest)
        self.count.received += fetched.received_bytes
        try:
            self._offered = self.outer.check(fetched.arrays, fetched.offer.versions)
            record = OuterRecord.from_json(fetched.offer.facts.get("outer"))
            return FetchedState(record, self._offered.digest, fetched.settled)
        except ValueError as error:
            raise DigestMismatch(f"{', '.join(addresses)} sent an invalid state: {error}") from None

    def install(self, outer: OuterRecord) -> None:
        """Adopt the last fetched state, and serve it under this record."""
        assert self._offered is not None
        self.outer.take_over(self._offered)
        self._offered = None
        self._end_fetching()
        self._results.clear()
        self._taken.clear()
        self.publish(outer)

    def show(self, inner: InnerOptimizerState) -> None:
        """Serve a copy of the inner optimizer's shards, replacing the previous copy."""
        leaves = {name: ServedArray(array, inner.step) for name, array in inner.arrays.items()}
        self.server.inner.publish(Snapshot(0, inner.step, leaves))

    def inherit(self, source: str) -> int:
        """Fetch the inner optimizer's shards from a peer's host; return its step count. Raises TransferFailed."""
        self._inner = None
        with closing(Fetcher(self.token, self.inner, dial=self.server.paths.dial)) as fetcher:
            fetched = fetcher.fetch([source], self.timeouts.heal, "/manifest/inner")
        self._inner = InnerOptimizerState(fetched.offer.round, fetched.arrays)
        return fetched.offer.round

    def inherited(self) -> InnerOptimizerState | None:
        """Return and clear the fetched shards of a peer's inner optimizer."""
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
        group.connect(self.timeouts.reduce)
        return group

    def _end_fetching(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def close(self) -> None:
        self._end_fetching()
        self.drop_group()
        self.server.close()
