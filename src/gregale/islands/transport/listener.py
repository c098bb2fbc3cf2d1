"""The connections of a server: bounded in number and in time, so that strangers cost next to nothing.

A connection is a *stranger's* until it has brought a request with the token's signature. Strangers never take the place
of the fleet: they have `MOST_STRANGERS` places of their own, each for `PATIENCE_SECONDS`. When these are taken, a new
connection ends the oldest one of the address that has the most.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

PATIENCE_SECONDS = 10.0
MOST_STRANGERS = 32
MOST_KNOWN = 2048
CLOCKS_APART_SECONDS = 300.0
LINES_AT_ONCE, SECONDS_PER_LINE = 4, 30.0


class Rationed:
    """Lines for a user, of which there may be too many: `at_once`, then one in `seconds_per_line`."""

    def __init__(
        self,
        say: Callable[[str], None],
        at_once: int = LINES_AT_ONCE,
        seconds_per_line: float = SECONDS_PER_LINE,
    ):
        self._say, self._lock = say, threading.Lock()
        self._most, self._per_second = float(at_once), 1 / seconds_per_line
        self._left, self._filled, self._dropped = self._most, time.monotonic(), 0

    def __call__(self, line: str) -> None:
        """Say a line, or count it for the next one."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._most, self._left + (now - self._filled) * self._per_second)
            self._filled = now
            if self._left < 1:
                self._dropped += 1
                return
            dropped, self._dropped = self._dropped, 0
            self._left -= 1
        self._say(f"{line} ({dropped} other lines of this kind were left out)" if dropped else line)


class Nonces:
    """Each nonce is taken once, within the time that clocks may be apart."""

    def __init__(self):
        self._lock = threading.Lock()
        self._taken: dict[str, float] = {}

    def take(self, nonce: str) -> bool:
        """Whether the nonce is new."""
        now = time.monotonic()
        with self._lock:
            while self._taken and now - next(iter(self._taken.values())) > 2 * CLOCKS_APART_SECONDS:
                del self._taken[next(iter(self._taken))]
            if nonce in self._taken:
                return False
            self._taken[nonce] = now
            return True


class Listener(ThreadingHTTPServer):
    """A thread for each connection, each of which is closed when it says nothing of use in time.

    - `complain`: gets a line for each connection that is refused
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any, complain: Callable[[str], None]):
        self._complain, self._lock = complain, threading.Lock()
        self._strangers: dict[Any, tuple[str, float]] = {}  # address, deadline; the oldest first
        self._ended: set[Any] = set()  # strangers whose threads have not noticed yet
        self._known: dict[Any, float] = {}  # deadlines
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the parent's look at the host's name, which takes seconds where no name server answers."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a new connection, in the place of another stranger's if there is none left."""
        with self._lock:
            is_full = len(self._strangers) >= MOST_STRANGERS
            has_room = len(self._strangers) + len(self._ended) < 2 * MOST_STRANGERS
            if is_full and has_room:
                self._end_one()
            if has_room:
                self._strangers[request] = client_address[0], time.monotonic() + PATIENCE_SECONDS
        if is_full:
            self._complain(f"{client_address[0]} connects while {MOST_STRANGERS} connections have brought no request")
        if has_room:
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def _end_one(self) -> None:
        counts = Counter(address for address, _ in self._strangers.values())
        busiest = max(counts, key=lambda address: counts[address])
        oldest = next(request for request, (address, _) in self._strangers.items() if address == busiest)
        del self._strangers[oldest]
        self._ended.add(oldest)
        shut(oldest)

    def admit(self, request: Any) -> bool:
        """A connection has brought a signed request: whether there is a place for it."""
        with self._lock:
            if request in self._known:
                return True
            if self._strangers.pop(request, None) is None or len(self._known) >= MOST_KNOWN:
                return False
            self._known[request] = time.monotonic() + PATIENCE_SECONDS
            return True

    def set_deadline(self, request: Any, seconds: float) -> None:
        """Close a connection of the fleet if nothing happens on it for so long; a stranger's deadline stays."""
        with self._lock:
            if request in self._known:
                self._known[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """End late connections; called several times a second, and after each new one."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, (_, deadline) in self._strangers.items() if now > deadline]
            late += [request for request, deadline in self._known.items() if now > deadline]
        for request in late:
            shut(request)

    def end_all(self) -> None:
        """End all connections."""
        with self._lock:
            requests = [*self._strangers, *self._known]
        for request in requests:
            shut(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread ends."""
        with self._lock:
            self._strangers.pop(request, None)
            self._known.pop(request, None)
            self._ended.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a mistake of ours; an `OSError` says that the client has gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._complain(f"{client_address[0]}: a request ended in {error!r}")


def shut(request: Any) -> None:
    """End a connection; its thread notices."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has gone on its own
