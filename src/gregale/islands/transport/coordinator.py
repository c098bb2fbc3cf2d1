"""A member's line to the coordinator, which `lighthouse` runs: signed questions and heartbeats over kept connections.

    coordinator = Coordinator("10.8.0.1:29510", "oslo", token, heartbeat_seconds=5.0)
    view = coordinator.ask({"round": 4}, timeout_seconds=30.0)
    view.id, view.headers
    coordinator.report(round=4, stalled=None)     # goes with the next heartbeat
    coordinator.close()

`protocol.membership` says when a view comes, and who is in it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT
from gregale.islands.protocol.news import NO_ROUND
from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, Unsigned
from gregale.islands.transport.lighthouse import ALIAS, LONGEST_REASON
from gregale.islands.transport.server import GREETING
from gregale.islands.transport.signing import canonical

CONNECT_SECONDS = 2.0
WAY_SECONDS = 2.0  # for an answer's way, beyond the time that others are waited for
KEPT_SECONDS = 5.0  # less than a server's PATIENCE_SECONDS: it closes an idle connection
MOST_KEPT = 2
LAST_REQUEST_SECONDS = 5.0  # that is waited for a request at the end
LARGEST_VIEW_BYTES = 64 << 20


class CoordinatorUnreachable(Exception):
    """Nobody listens at the coordinator's address, or the connection broke; asking again makes a new connection."""


class CoordinatorRefuses(CoordinatorUnreachable):
    """The coordinator took this member's requests before, and refuses one now; it may take them again."""


class NotAdmitted(Exception):
    """The coordinator does not take this member: another token, a wrong clock, or a name that another island has."""


class CoordinatorTimeout(Exception):
    """The coordinator has not answered within the time: others were waited for."""


class View(NamedTuple):
    """What the coordinator answered: the same for all that are in it.

    - `id`: counts up when the *membership* changes, not with each answer; another number after a restart
    - `headers`: of all members, sorted by `name`
    """

    id: int
    headers: list[dict]


class CoordinatorClient:
    """A member's line to the coordinator: beats in a thread from the start until `close`, reconnects on its own.

    - `name`: the member's, one per fleet
    - `session`: of this process; by default a new one
    """

    def __init__(self, address: str, name: str, token: bytes, heartbeat_seconds: float, session: str | None = None):
        self.address, self.name = address, name
        self._session = session or secrets.token_hex(8)
        self._lines = Lines(address, token)
        self._interval_seconds = heartbeat_seconds / BEATS_PER_TIMEOUT
        self._numbers = itertools.count()
        self._status = {"round": NO_ROUND, "stalled": ""}
        self._heard = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gregale-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, header: dict, timeout_seconds: float) -> View:
        """Send this member's header (JSON; `name` is added) and wait for the view.

        Raises CoordinatorUnreachable or NoAnswer, both of which may be tried again, and NotAdmitted. A newer question
        of this member ends an older one with NoAnswer.
        """
        question = {"number": next(self._numbers), "seconds": timeout_seconds, "header": header}
        reply = self._send("ask", question, timeout_seconds + WAY_SECONDS)
        if refused := reply.get("refused"):
            raise NotAdmitted(f"islands.name: the lighthouse at {self.address} refuses this island: {refused}.")
        if (view := reply.get("view")) is None:
            raise CoordinatorTimeout(f"The lighthouse at {self.address} has not answered in time.")
        return View(view["id"], view["headers"])

    def report(self, round: int, stalled: str | None) -> None:
        """Tell the coordinator, with the next heartbeats, which round is committed, and why no other one follows."""
        self._status = {"round": round, "stalled": (stalled or "")[:LONGEST_REASON]}

    @property
    def last_heard_seconds(self) -> float:
        """How long ago the coordinator last took a heartbeat or gave an answer."""
        return time.monotonic() - self._heard

    def close(self) -> None:
        """Stop beating, and say so: the others do not wait for this member. Waits for a request that is under way."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(LAST_REQUEST_SECONDS)
        if self._lines.has_met:
            self._say("leave", {})
        self._lines.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            self._say("beat", self._status)

    def _say(self, kind: str, content: dict) -> None:
        try:
            self._send(kind, content, CONNECT_SECONDS)
        except (CoordinatorUnreachable, NotAdmitted):
            return  # `last_heard_seconds` tells, and the next question raises

    def _send(self, kind: str, content: dict, wait_seconds: float) -> dict:
        message = {"kind": kind, "name": self.name, "session": self._session, **content}
        reply = self._lines.request(message, wait_seconds)
        self._heard = time.monotonic()
        return reply


class Lines:
    """Connections to the coordinator, for several threads. Each takes the one that has rested the longest, so that
    heartbeats keep all of them open: an open one does not compete with strangers for a place.

    - `has_met`: whether the coordinator has ever answered
    """

    def __init__(self, address: str, token: bytes):
        self.has_met = False
        self._address, self._token = address, token
        self._recipient: str | None = None  # the server's name, since its last start
        self._kept: deque[tuple[float, PeerClient]] = deque()
        self._lock = threading.Lock()

    def request(self, message: dict, wait_seconds: float) -> dict:
        """The coordinator's reply. Raises CoordinatorUnreachable or NotAdmitted."""
        body = canonical(message)
        try:
            if self._recipient is not None:
                with suppress(Unsigned):  # it has started again since, and has another name
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
        """End the connections that no request uses."""
        with self._lock:
            kept, self._kept = self._kept, deque()
        for _, peer in kept:
            peer.close()

    def _take(self) -> PeerClient:
        recipient = self._recipient
        if recipient is None:
            self.close()
            recipient = self._recipient = self._greet()
        with self._lock:
            while self._kept:
                used, peer = self._kept.popleft()
                if time.monotonic() - used < KEPT_SECONDS:
                    return peer
                peer.close()
        return PeerClient(f"{self._address}/{recipient}", self._token, CONNECT_SECONDS)

    def _greet(self) -> str:
        """The server's name since it started, which nobody can know before."""
        peer = PeerClient(f"{self._address}/{ALIAS}", self._token, CONNECT_SECONDS)
        try:
            recipient = str(peer.request("GET", GREETING).get("recipient"))
        finally:
            peer.close()
        self.has_met = True
        return recipient

    def _keep(self, peer: PeerClient) -> None:
        with self._lock:
            if len(self._kept) < MOST_KEPT:
                self._kept.append((time.monotonic(), peer))
                return
        peer.close()

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, Unsigned | RequestRejected):
            return CoordinatorUnreachable(f"The lighthouse at {error}")
        if self.has_met:
            return CoordinatorRefuses(f"The lighthouse at {self._address} refuses a request: {error}")
        return NotAdmitted(f"islands.lighthouse: {error}. See that islands.token_file is the same everywhere.")
