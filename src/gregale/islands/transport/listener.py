"""The connections of a server: limited in number and time, so that unidentified connections cost little.

A connection is *unidentified* until its TLS handshake has shown the fleet's certificate. Unidentified connections use
`MAX_UNIDENTIFIED` slots of their own, each for `IDLE_SECONDS`, and never take a slot of the fleet. When these slots are
full, a new connection ends the oldest one of the address that has the most.
"""

import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from gregale.islands.transport.tls import is_revoked, shut, tls_contexts

IDLE_SECONDS = 10.0
KEPT_SECONDS = 60.0  # between two requests of the fleet: a new connection costs as much as several requests
MAX_UNIDENTIFIED = 256  # so many islands may begin at once
MAX_IDENTIFIED = 2048
LINES_AT_ONCE, SECONDS_PER_LINE = 4, 30.0


class RateLimitedLines:
    """A rate limit for lines to the user: `at_once` lines, then one in `seconds_per_line`."""

    def __init__(
        self, say: Callable[[str], None], at_once: int = LINES_AT_ONCE, seconds_per_line: float = SECONDS_PER_LINE
    ):
        self._say, self._lock = say, threading.Lock()
        self._max_left, self._per_second = float(at_once), 1 / seconds_per_line
        self._left, self._filled, self._dropped = self._max_left, time.monotonic(), 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            self._left = min(self._max_left, self._left + (now - self._filled) * self._per_second)
            self._filled = now
            if self._left < 1:
                self._dropped += 1
                return
            dropped, self._dropped = self._dropped, 0
            self._left -= 1
        self._say(f"{line} ({dropped} other lines of this kind were left out)" if dropped else line)


class Listener(ThreadingHTTPServer):
    """A server with a thread for each connection, which closes connections without useful traffic in time.

    - `token`: of the fleet, or a key; the handler makes the handshake, in the thread of the connection
    - `complain`: receives a line for each rejected connection
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: Any, token: bytes, complain: Callable[[str], None]):
        self._token, self._complain, self._lock = token, complain, threading.Lock()
        self._tls, _, _, _, self._revoked = tls_contexts(token)
        self._revocations_seen = 0
        self._unidentified: dict[Any, tuple[str, float]] = {}  # address and deadline, the oldest first
        self._ended: set[Any] = set()  # unidentified ones that were ended, with threads that still run
        self._identified: dict[Any, tuple[bytes, float]] = {}  # certificate of the peer, and deadline
        self._released: set[Any] = set()  # with threads that still run
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the parent's reverse lookup, which takes seconds where no name server answers."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]

    def get_request(self) -> tuple[ssl.SSLSocket, Any]:
        connection, address = super().get_request()
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a new connection; if no slot is free, end an unidentified connection."""
        with self._lock:
            is_full = len(self._unidentified) >= MAX_UNIDENTIFIED
            has_room = len(self._unidentified) + len(self._ended) < 2 * MAX_UNIDENTIFIED
            if is_full and has_room:
                self._end_one()
            if has_room:
                self._unidentified[request] = client_address[0], time.monotonic() + IDLE_SECONDS
        if is_full:
            self._complain(f"{client_address[0]} connects while {MAX_UNIDENTIFIED} connections have no handshake")
        if has_room:
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def _end_one(self) -> None:
        counts = Counter(address for address, _ in self._unidentified.values())
        busiest = max(counts, key=lambda address: counts[address])
        oldest = next(request for request, (address, _) in self._unidentified.items() if address == busiest)
        del self._unidentified[oldest]
        self._ended.add(oldest)
        shut(oldest)

    def admit(self, request: Any) -> bool:
        """Give a connection of the fleet a slot; return whether there was one."""
        shown = request.getpeercert(binary_form=True)  # kept, because a relay ends the connection's TLS
        with self._lock:
            if self._unidentified.pop(request, None) is None or len(self._identified) >= MAX_IDENTIFIED:
                return False
            self._identified[request] = shown, time.monotonic() + KEPT_SECONDS
            return True

    def release(self, request: Any) -> None:
        """Leave a connection to another user, who closes it."""
        with self._lock:
            self._identified.pop(request, None)
            self._released.add(request)

    def set_deadline(self, request: Any, seconds: float) -> None:
        """Set an identified connection's idle limit; the deadline of an unidentified one stays."""
        with self._lock:
            if request in self._identified:
                self._identified[request] = self._identified[request][0], time.monotonic() + seconds

    def service_actions(self) -> None:
        """End late connections, and those of revoked keys; called several times a second, and after each new one."""
        if complaint := self._revoked.reload():
            self._complain(complaint)
        now, version = time.monotonic(), self._revoked.version
        with self._lock:
            late = [request for request, (_, deadline) in self._unidentified.items() if now > deadline]
            late += [request for request, (_, deadline) in self._identified.items() if now > deadline]
            if version != self._revocations_seen:
                self._revocations_seen = version
                late += [request for request, (shown, _) in self._identified.items() if is_revoked(self._token, shown)]
        for request in late:
            shut(request)

    def end_all(self) -> None:
        with self._lock:
            requests = [*self._unidentified, *self._identified]
        for request in requests:
            shut(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._unidentified.pop(request, None)
            self._identified.pop(request, None)
            self._ended.discard(request)
            is_released = request in self._released
            self._released.discard(request)
        if not is_released:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a failed handshake or an internal error; any other `OSError` means that the client has gone."""
        error = sys.exc_info()[1]
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            self._complain(
                f"{client_address[0]} was refused: it has another token, or does not speak TLS ({error.reason})"
            )
        elif not isinstance(error, OSError):
            self._complain(f"{client_address[0]}: a request ended in {error!r}")
