"""The client of the coordinator (`lighthouse`): requests and heartbeats; `protocol.membership` has its rules."""

import itertools
import secrets
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from gregale.distributed.signing import canonical
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT
from gregale.islands.protocol.wire import NO_ROUND
from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, WrongServer, ask_status
from gregale.islands.transport.lighthouse import ALIAS, LONGEST_REASON

CONNECT_SECONDS = 2.0
NETWORK_SECONDS = 2.0  # for the network, beyond the coordinator's wait for other members
MAX_KEPT = 2
LAST_REQUEST_SECONDS = 5.0  # limit for a request in progress at the end
LARGEST_VIEW_BYTES = 64 << 20


class CoordinatorUnreachable(Exception):
    """No process listens at the coordinator's address, or the connection broke; the next request reconnects."""


class CoordinatorRefuses(CoordinatorUnreachable):
    """The coordinator rejects a request, after it accepted earlier ones; it may accept later ones."""


class NotAdmitted(Exception):
    """The coordinator does not admit this member: another token, a wrong clock, or a duplicate name."""


class CoordinatorTimeout(Exception):
    """The coordinator has not answered within the timeout, because it waits for other members."""


class View(NamedTuple):
    """The coordinator's answer, the same for all its members."""

    id: int  # increases when the *membership* changes, not with each answer; arbitrary after a restart
    headers: list[dict]  # of all members, sorted by `name`


class CoordinatorClient:
    """A member's client of the coordinator: sends heartbeats from a thread until `close`, and reconnects by itself.

    - `name`: of the member, unique in the fleet
    - `session`: of this process; by default a new one
    """

    def __init__(self, address: str, name: str, token: bytes, heartbeat_seconds: float, session: str | None = None):
        self.address, self.name = address, name
        self._session = session or secrets.token_hex(8)
        self._pool = ConnectionPool(address, token)
        self._interval_seconds = heartbeat_seconds / BEATS_PER_TIMEOUT
        self._numbers = itertools.count()
        self._status = {"round": NO_ROUND, "stalled": ""}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gregale-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, header: dict, timeout_seconds: float) -> View:
        """Send this member's header (JSON; `name` is added) and wait for the view.

        Raises CoordinatorUnreachable or CoordinatorTimeout, both of which may be retried, and NotAdmitted. A newer
        request of this member ends an older one with CoordinatorTimeout.
        """
        request = {"number": next(self._numbers), "seconds": timeout_seconds, "header": header}
        reply = self._send("ask", request, timeout_seconds + NETWORK_SECONDS)
        if refused := reply.get("refused"):
            raise NotAdmitted(f"islands.name: the lighthouse at {self.address} refuses this island: {refused}.")
        if (view := reply.get("view")) is None:
            raise CoordinatorTimeout(f"The lighthouse at {self.address} has not answered in time.")
        return View(view["id"], view["headers"])

    def report(self, round: int, stalled: str | None) -> None:
        """Report the committed round, and the reason of a stall, to the coordinator with the next heartbeats."""
        self._status = {"round": round, "stalled": (stalled or "")[:LONGEST_REASON]}

    def close(self) -> None:
        """Announce the leave, so that no member waits for this one, and stop. Wait for a request in progress."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(LAST_REQUEST_SECONDS)
        if self._pool.has_met:
            self._say("leave", {})
        self._pool.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            self._say("beat", self._status)

    def _say(self, kind: str, content: dict) -> None:
        try:
            self._send(kind, content, CONNECT_SECONDS)
        except (CoordinatorUnreachable, NotAdmitted):
            return  # the next view request raises

    def _send(self, kind: str, content: dict, wait_seconds: float) -> dict:
        message = {"kind": kind, "name": self.name, "session": self._session, **content}
        return self._pool.request(message, wait_seconds)


class ConnectionPool:
    """Connections to the coordinator, for several threads. Each request takes the longest idle one.

    So heartbeats keep all of them open, and none has to compete with unidentified connections for a slot.

    - `has_met`: whether the coordinator has ever answered
    """

    def __init__(self, address: str, token: bytes):
        self.has_met = False
        self._address, self._token = address, token
        self._recipient: str | None = None  # the server's random name, since its last start
        self._kept: deque[PeerClient] = deque()
        self._lock = threading.Lock()

    def request(self, message: dict, wait_seconds: float) -> dict:
        """Return the coordinator's reply. Raises CoordinatorUnreachable or NotAdmitted."""
        body = canonical(message)
        try:
            if self._recipient is not None:
                with suppress(WrongServer):  # it has restarted and has another name
                    return self._exchange(body, wait_seconds)
                self._recipient = None
            return self._exchange(body, wait_seconds)
        except (PeerUnreachable, RequestRejected) as error:
            self._recipient = None
            raise self._failure(error) from None

    def _exchange(self, body: bytes, wait_seconds: float) -> dict:
        peer = self._take()
        try:
            reply = peer.request("POST", "/message", body, LARGEST_VIEW_BYTES, wait_seconds)
        except (PeerUnreachable, RequestRejected):
            peer.close()
            raise
        self._keep(peer)
        return reply

    def close(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            kept, self._kept = self._kept, deque()
        for peer in kept:
            peer.close()

    def _take(self) -> PeerClient:
        recipient = self._recipient
        if recipient is None:
            self.close()
            # The random name that the server drew at its start.
            recipient = str(ask_status(f"{self._address}/{ALIAS}", self._token, CONNECT_SECONDS).get("recipient"))
            self._recipient, self.has_met = recipient, True
        with self._lock:
            if self._kept:
                return self._kept.popleft()
        return PeerClient(f"{self._address}/{recipient}", self._token, CONNECT_SECONDS)

    def _keep(self, peer: PeerClient) -> None:
        with self._lock:
            if len(self._kept) < MAX_KEPT:
                self._kept.append(peer)
                return
        peer.close()

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, WrongServer | RequestRejected):
            return CoordinatorUnreachable(f"The lighthouse at {error}")
        if self.has_met:
            return CoordinatorRefuses(f"The lighthouse at {self._address} refuses a request: {error}")
        return NotAdmitted(f"islands.lighthouse: {error}. See that islands.token_file is the same everywhere.")
