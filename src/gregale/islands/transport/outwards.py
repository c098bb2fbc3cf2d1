"""Connections to hosts that only connect outwards, as behind a NAT: nobody can open a connection to them.

Such a host *parks* connections at the servers of the hosts that it reaches, and at the coordinator: requests that are
answered when a host has something to ask of it. From then on it serves the connection as if it had accepted it. A host
at whose server connections are parked takes one of these. Any other asks the coordinator to *relay*: this joins a
parked connection with the one of the caller. Both sides end TLS with the coordinator, which from then on copies bytes
between two sockets, and begin TLS with each other. So it can neither read nor change what they send.
"""

import select
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from http.client import HTTPException
from ssl import SSLSocket
from typing import NamedTuple

from gregale.distributed.agreement import canonical
from gregale.islands.transport.client import OUTWARDS, PeerClient, PeerUnreachable, RequestRejected
from gregale.islands.transport.tls import shut, tls_contexts

PARK_PATH, RELAY_PATH = "/park", "/relay"
PARKED = 2  # connections at each server: one is replaced while the other is taken
PARK_SECONDS = 20.0  # after which a request to park is repeated: a NAT forgets connections without traffic
OWN_SECONDS = 1.0  # a caller's wait for a connection that is parked here; then it asks the coordinator
CONNECT_SECONDS, RETRY_SECONDS = 5.0, 1.0
RELAY_BYTES = 64 << 10  # on their way in a direction of a relay, beside the sockets' own buffers
# A relay ends if a side has vanished: probes after a silence, between two probes, number of them.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
TAKE_SECONDS = 60.0  # and if a side takes no byte, or acknowledges none, for so long


class Call(NamedTuple):
    """A use of a parked connection.

    - `use`: receives the connection, and closes it at the end; `relayed`: returns when the relay has ended
    """

    relayed: bool
    use: Callable[[SSLSocket], None]


class _Slot:
    def __init__(self, connection: SSLSocket):
        self.connection, self.ended = connection, threading.Event()
        self.call: Call | None = None  # if it was taken


class Parking:
    def __init__(self):
        self._changed = threading.Condition()
        self._slots: dict[str, deque[_Slot]] = defaultdict(deque)

    def wait(self, recipient: str, connection: SSLSocket, seconds: float) -> Call | None:
        """Park a connection; return how it is to be used, None if nobody has taken it in time."""
        slot = _Slot(connection)
        with self._changed:
            self._slots[recipient].append(slot)
            self._changed.notify_all()
        slot.ended.wait(seconds)
        with self._changed:
            if slot in (slots := self._slots[recipient]):
                slots.remove(slot)
            if not slots:
                del self._slots[recipient]
        return slot.call

    def take(self, recipient: str, call: Call, seconds: float) -> bool:
        """Use the oldest connection of a recipient; wait for one. Return whether there was one."""

        def taken() -> bool:
            while slots := self._slots.get(recipient):
                slot = slots.popleft()
                slot.call = None if is_readable(slot.connection) else call  # its host only sends to close it
                slot.ended.set()
                if slot.call is not None:
                    return True
            return False

        with self._changed:
            return self._changed.wait_for(taken, seconds)


class Paths:
    """The ways from a host to its peers, and from them to this host if that only connects outwards.

    - `recipient`: of this host's server
    - `serve`: receives each connection on which a peer sends requests to this host
    """

    def __init__(self, token: bytes, recipient: str, serve: Callable[[SSLSocket], None]):
        self.parking = Parking()
        self._token, self._recipient, self._serve = token, recipient, serve
        self._changed = threading.Condition()
        self._relay, self._parked_at = "", frozenset[str]()
        self._threads = Counter[str]()  # that park, by address
        self._is_outwards = False

    def update(self, own: str, peers: Iterable[str], relay: str) -> None:
        """Follow the addresses of a view: of this host, of its peers, and of the coordinator, which relays."""
        is_outwards = own.startswith(OUTWARDS)
        wanted = frozenset({relay, *(peer for peer in peers if not peer.startswith(OUTWARDS))} if is_outwards else ())
        with self._changed:
            self._parked_at, self._relay, self._is_outwards = wanted, relay, is_outwards
            self._changed.notify_all()
            new = [address for address in wanted for _ in range(PARKED - self._threads[address])]
            self._threads.update(new)
        for address in new:
            threading.Thread(target=self._park, args=(address,), name="gregale-parked", daemon=True).start()

    def close(self) -> None:
        self.update("", (), "")

    def dial(self, recipient: str, seconds: float) -> SSLSocket:
        """Return a connection to a host that only connects outwards. Raises OSError or PeerUnreachable."""
        until, answer = time.monotonic() + seconds, Future[SSLSocket]()
        own_seconds = 0.0 if self._is_outwards else min(OWN_SECONDS, seconds / 2)
        if self.parking.take(recipient, Call(False, answer.set_result), own_seconds):
            return answer.result(seconds)
        if not self._relay:
            raise OSError("it has opened no connection to this host")
        seconds = max(until - time.monotonic(), 0.0)
        with closing(PeerClient(self._relay, self._token, seconds)) as client:
            try:
                client.request("POST", RELAY_PATH, canonical({"recipient": recipient, "seconds": seconds}))
            except RequestRejected as error:
                raise PeerUnreachable(str(error)) from None
            plain = client.release().unwrap()
        try:
            return tls_contexts(self._token).client.wrap_socket(plain)
        finally:
            plain.close()  # only if it was not wrapped: otherwise it has no descriptor any more

    def _park(self, address: str) -> None:
        """Keep a connection parked at a server while the server is a peer's in the newest view."""
        body = canonical({"recipient": self._recipient})
        while True:
            with (
                suppress(OSError, HTTPException, RequestRejected, PeerUnreachable),
                closing(PeerClient(address, self._token, CONNECT_SECONDS)) as client,
            ):
                while address in self._parked_at:
                    reply = client.request("POST", PARK_PATH, body, wait_seconds=PARK_SECONDS + CONNECT_SECONDS)
                    if reply.get("called") and address in self._parked_at:
                        self._answer(client.release(), bool(reply.get("relayed")))
            with self._changed:
                if self._changed.wait_for(lambda: address not in self._parked_at, RETRY_SECONDS):
                    self._threads[address] -= 1
                    return

    def _answer(self, connection: SSLSocket, relayed: bool) -> None:
        if relayed:
            context = tls_contexts(self._token).server
            connection = context.wrap_socket(connection.unwrap(), server_side=True, do_handshake_on_connect=False)
        self._serve(connection)


def is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def relay(connection: SSLSocket, parking: Parking, recipient: str, seconds: float, reply: Callable[[], None]) -> bool:
    """Join a connection with one of a recipient until a side ends; return False if there was none in time.

    - `reply`: tells the caller on `connection` that TLS with this host ends here
    """
    other, ended = Future[socket.socket](), threading.Event()

    def use(parked: SSLSocket) -> None:
        try:
            other.set_result(parked.unwrap())
        except OSError as error:
            other.set_exception(error)
        ended.wait()  # so that a revocation of its key ends the connection, as any other of the server

    if not parking.take(recipient, Call(True, use), seconds):
        return False
    try:
        second = other.result(CONNECT_SECONDS)
        reply()
        first = connection.unwrap()
        for each in (first, second):
            keep_alive(each)
        back = threading.Thread(target=copy, args=(second, first), name="gregale-relay", daemon=True)
        back.start()
        copy(first, second)
        back.join()
    finally:
        ended.set()
    return True


def keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not `settimeout`, which would also limit the time between two messages.
    limit = struct.pack("ll", int(TAKE_SECONDS), int(TAKE_SECONDS % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    limits = {socket.TCP_USER_TIMEOUT: int(TAKE_SECONDS * 1000), socket.TCP_NODELAY: 1}
    for option, value in {**KEEP_ALIVE, **limits}.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def copy(source: socket.socket, target: socket.socket) -> None:
    """Send what a socket receives to another one, until one of them ends; then end both."""
    buffer = memoryview(bytearray(RELAY_BYTES))
    with suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    shut(source)
    shut(target)
