"""The exchanges of an island with its peers: the reduce of a round, healing, and short messages and probes."""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from threading import Event, Lock, Thread
from typing import Any

from gregale.islands.host_group import HostGroup
from gregale.islands.host_worker import FetchedState, NotFinite
from gregale.islands.protocol import messages as protocol
from gregale.islands.protocol.headers import OuterRecord, Peer
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.spread import distances
from gregale.islands.trainer_command import RoundPacing
from gregale.islands.transport.client import OUTWARDS, Dial, PeerUnreachable, RequestRejected, ask_status, call
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.transfer import TransferFailed

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
        """Return a text that names the silent peers; empty if all answered."""
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


def announce(address: str, token: bytes, number: int, dial: Dial) -> None:
    """Announce to a peer that a round is due. A lost announcement is not repeated here."""
    with suppress(PeerUnreachable, RequestRejected):
        call(address, token, {"kind": "due", "round": number}, TELL_SECONDS, dial)


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


def exchanged(
    action: protocol.Reduce, member: Member, worker: HostGroup, token: bytes, report: Callable[[str, bool], None]
) -> protocol.Reduced | protocol.ReduceFailed:
    """Reduce a round with its members and return the resulting protocol event."""
    own, heartbeat = member.identity.name, member.timing.heartbeat_seconds
    place, count = [peer.name for peer in action.members].index(own), len(action.members)
    # A round that has failed is tried again with probes of all members, because the protocol leaves silent ones out.
    probed = range(1, count) if member.header.failures else distances(count)
    others = {peer.name: peer.hosts[0] for peer in (action.members[(place + each) % count] for each in probed)}
    watch = PeerProbe(others, token, heartbeat, worker.drop_group, worker.dial)
    try:
        with watch:
            digest = worker.reduce(action, own)
    except NotFinite:
        return protocol.ReduceFailed(action.key, overflowed=True)
    except GroupFailed as error:
        report(f"Round {action.round} is tried again: {watch.reason() or error}", False)
        return protocol.ReduceFailed(action.key, tuple(watch.silent))
    return protocol.Reduced(action.key, digest)


def fetched(action: protocol.Heal, worker: HostGroup, pace: RoundPacing) -> protocol.Healed | protocol.HealFailed:
    """Fetch the state of peers, with their inner optimizer if it is wanted, and return the resulting protocol event."""
    sources, is_whole = action.sources, pace.schedule.fragments == 1  # then a round changes the whole state
    try:
        outer = newest(lambda settled: worker.heal(sources, settled), is_whole, worker.timeouts.reduce)
        worker.inherit(sources)
        return protocol.Healed(outer)
    except TransferFailed as error:
        return protocol.HealFailed(str(error))


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
