"""Asks peers whether they live: the sockets of a group say nothing of one that is cut off. Tells them small things."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread

from gregale.islands.protocol.headers import Peer
from gregale.islands.transport.client import PeerUnreachable, RequestRejected, ask_status, call

FIND_SECONDS = 2.0
TELL_SECONDS = 2.0
THREADS = 8


def dead_peers(peers: Iterable[Peer]) -> frozenset[str]:
    """The identities of those whose host refuses a connection: it is there, and their process is not.

    Who does not answer may be cut off, or stopped for a while: that says nothing.
    """
    return frozenset(peer.identity for peer in peers if _is_refused(peer.hosts[0]))


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
    """In a `with` statement: asks peers whether they live; calls `drop` for one that is silent for `seconds`.

    Nobody is asked in the first half of that time, in which most rounds are over.

    - `peers`: addresses by name
    - `silent`: names of those that did not answer
    """

    def __init__(self, peers: Mapping[str, str], token: bytes, seconds: float, drop: Callable[[], None]):
        self._peers, self._token, self._half, self._drop = peers, token, seconds / 2, drop
        self._over = Event()
        self.silent: list[str] = []

    def reason(self) -> str:
        """Who did not answer, in words; empty if all did."""
        return f"{' and '.join(self.silent)} did not answer" if self.silent else ""

    def __enter__(self) -> PeerProbe:
        Thread(target=self._begin, daemon=True, name="watching").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _begin(self) -> None:
        if not self._over.wait(self._half):
            for name, address in self._peers.items():
                Thread(target=self._watch, args=(name, address), daemon=True, name=f"watching-{name}").start()

    def _watch(self, name: str, address: str) -> None:
        while not self._over.is_set():
            try:
                ask_status(address, self._token, self._half)
            except PeerUnreachable:
                if not self._over.is_set():
                    self.silent.append(name)
                    self._drop()
                return
            except RequestRejected:
                return  # it lives
            self._over.wait(self._half)


class Telling:
    """Tells peers with this fleet's `token`."""

    def __init__(self, token: bytes):
        self._token, self._threads = token, ThreadPoolExecutor(THREADS, "telling")

    def due(self, addresses: Sequence[str], number: int) -> None:
        """Tells these peers that a round is due. What does not arrive is told again."""
        for address in addresses:
            self.soon(lambda address=address: self._due(address, number))

    def soon(self, what: Callable[[], object]) -> None:
        """Does something else that may take a while."""
        self._threads.submit(what)

    def close(self) -> None:
        """Begins nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _due(self, address: str, number: int) -> None:
        with suppress(PeerUnreachable, RequestRejected):
            call(address, self._token, {"kind": "due", "round": number}, TELL_SECONDS)
