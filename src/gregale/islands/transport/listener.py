"""The connections of a server: limited in number and time, so that unidentified connections cost little.

A connection is *unidentified* until it has sent a request with the token's signature. Unidentified connections use
`MAX_UNIDENTIFIED` slots of their own, each for `IDLE_SECONDS`, and never take a slot of the fleet. When these slots are
full, a new connection ends the oldest one of the address that has the most.
"""

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

IDLE_SECONDS = 10.0
MAX_UNIDENTIFIED = 32
MAX_IDENTIFIED = 2048
CLOCKS_APART_SECONDS = 300.0
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
        """Print a line, or count it for the next one."""
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


class Nonces:
    """Nonces that were used; the time that clocks may differ bounds how long they are kept."""

    def __init__(self):
        self._lock = threading.Lock()
        self._taken: dict[str, float] = {}

    def take(self, nonce: str) -> bool:
        """Record a nonce; return whether it is new."""
        now = time.monotonic()
        with self._lock:
            while self._taken and now - next(iter(self._taken.values())) > 2 * CLOCKS_APART_SECONDS:
                del self._taken[next(iter(self._taken))]
            if nonce in self._taken:
                return False
            self._taken[nonce] = now
            return True


class Listener(ThreadingHTTPServer):
    """A server with a thread for each connection, which closes connections without useful traffic in time.

    - `complain`: receives a line for each rejected connection
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any, complain: Callable[[str], None]):
        self._complain, self._lock = complain, threading.Lock()
        self._unidentified: dict[Any, tuple[str, float]] = {}  # address and deadline, the oldest first
        self._ended: set[Any] = set()  # unidentified ones that were ended, with threads that still run
        self._identified: dict[Any, float] = {}  # deadlines
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the parent's reverse lookup, which takes seconds where no name server answers."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]

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
            self._complain(f"{client_address[0]} connects while {MAX_UNIDENTIFIED} connections have brought no request")
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
        """Give a connection with a signed request a slot; return whether there was one."""
        with self._lock:
            if request in self._identified:
                return True
            if self._unidentified.pop(request, None) is None or len(self._identified) >= MAX_IDENTIFIED:
                return False
            self._identified[request] = time.monotonic() + IDLE_SECONDS
            return True

    def set_deadline(self, request: Any, seconds: float) -> None:
        """Set an identified connection's idle limit; the deadline of an unidentified one stays."""
        with self._lock:
            if request in self._identified:
                self._identified[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """End late connections; called several times a second, and after each new one."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, (_, deadline) in self._unidentified.items() if now > deadline]
            late += [request for request, deadline in self._identified.items() if now > deadline]
        for request in late:
            shut(request)

    def end_all(self) -> None:
        with self._lock:
            requests = [*self._unidentified, *self._identified]
        for request in requests:
            shut(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread ends."""
        with self._lock:
            self._unidentified.pop(request, None)
            self._identified.pop(request, None)
            self._ended.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an internal error; an `OSError` means that the client has gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._complain(f"{client_address[0]}: a request ended in {error!r}")


def shut(request: Any) -> None:
    """End a connection; its thread notices."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer closed it first
