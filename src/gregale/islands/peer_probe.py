"""Liveness checks of peers, because a group's sockets do not report a cut-off peer; and short messages to peers."""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from threading import Event, Thread

from gregale.islands.protocol.headers import Peer
from gregale.islands.transport.client import PeerUnreachable, RequestRejected, ask_status, call

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

    A busy server answers late, or closes a connection that has waited too long. So a probe is repeated until it has
    taken three quarters of `seconds`. The first probes are sent during the first quarter, one after the other.

    - `peers`: addresses by name
    - `silent`: the names of the peers that did not answer
    """

    def __init__(self, peers: Mapping[str, str], token: bytes, seconds: float, drop: Callable[[], None]):
        self._peers, self._token, self._quarter, self._drop = peers, token, seconds / 4, drop
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
                    ask_status(address, self._token, max(until - time.monotonic(), PAUSE_SECONDS))
                silent_at, pause = None, self._quarter
            except PeerUnreachable:
                silent_at, pause = until, PAUSE_SECONDS
                if time.monotonic() >= until and not self._over.is_set():
                    self.silent.append(name)
                    self._drop()
                    return


def announce(address: str, token: bytes, number: int) -> None:
    """Announce to a peer that a round is due. A lost announcement is not repeated here."""
    with suppress(PeerUnreachable, RequestRejected):
        call(address, token, {"kind": "due", "round": number}, TELL_SECONDS)
