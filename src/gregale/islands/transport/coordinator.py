"""The client of the coordinator (`lighthouse`): requests and heartbeats; `protocol.membership` has its rules."""

import itertools
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress

from gregale.distributed.signing import canonical
from gregale.errors import UserError
from gregale.islands.protocol.headers import FORMAT
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT
from gregale.islands.protocol.messages import Heartbeat
from gregale.islands.protocol.settings import Timing
from gregale.islands.protocol.wire import NO_ROUND, Columns, read_texts, to_texts
from gregale.islands.transport.client import KeyRevoked, PeerClient, PeerUnreachable, RequestRejected, WrongServer
from gregale.islands.transport.lighthouse import LONGEST_REASON, NAME
from gregale.islands.transport.tls import tls_contexts

CONNECT_SECONDS = 2.0
LAST_REQUEST_SECONDS = 5.0  # limit for a request in progress at the end
LARGEST_VIEW_BYTES = 64 << 20


class CoordinatorUnreachable(Exception):
    """No process listens at the coordinator's address, or the connection broke; the next request reconnects."""


class CoordinatorRefuses(CoordinatorUnreachable):
    """The coordinator rejects a request, after it accepted earlier ones; it may accept later ones."""


class NotAdmitted(UserError):
    """The coordinator does not admit this member: it has another token, or other messages."""


class Revoked(NotAdmitted):
    """This member's key was revoked."""


class NameTaken(NotAdmitted):
    """Another process has the member's name; an earlier one of this island may be about to end."""

    exit_code = os.EX_TEMPFAIL


class RequestDropped(Exception):
    """The coordinator has dropped a request: a newer one has replaced it, or this member was silent or has left."""


def headers_of_fleet(address: str, token: bytes) -> Columns:
    """Return the headers of the islands that run; empty if none runs, or the coordinator is not reached.

    The process that asks does not join. Raises NotAdmitted.
    """
    pool, message = ConnectionPool(address, token), {"format": FORMAT, "kind": "fleet"}
    try:
        return read_texts(pool.request(message, CONNECT_SECONDS)["headers"])
    except CoordinatorUnreachable:
        return {}
    finally:
        pool.close()


class CoordinatorClient:
    """A member's client of the coordinator: sends heartbeats from a thread until `close`, and reconnects by itself.

    - `name`: of the member, unique in the fleet
    - `timing`: the coordinator takes its seconds from it
    - `session`: of this process; by default a new one
    - `last_heartbeat`: the result of the newest heartbeat
    - `revoked`: the error that ends this member, if its key was revoked
    """

    def __init__(self, address: str, name: str, token: bytes, timing: Timing, session: str | None = None):
        self.address, self.name, self.last_heartbeat = address, name, Heartbeat()
        self.revoked: Revoked | None = None
        self._session, self._timing = session or secrets.token_hex(8), timing
        self._pool = ConnectionPool(address, token)
        self._numbers = itertools.count()
        self._status = {"round": NO_ROUND, "stalled": ""}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gregale-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, header: dict, needed: int) -> tuple[int, Columns]:
        """Send this member's header (JSON; `name` is added); wait for a view of `needed` members or more.

        Return its id, which increases when the *membership* changes, and the headers of its members, sorted by `name`.

        The coordinator holds the request, and confirms this every `hold_seconds`: then it is repeated with its number,
        and takes the view that was formed in between. Raises CoordinatorUnreachable, which may be retried,
        RequestDropped, and NotAdmitted or NameTaken.
        """
        timing = self._timing
        request = {"number": next(self._numbers), "needed": needed, "header": to_texts(header)}
        request |= {"hold_seconds": timing.hold_seconds, "gather_seconds": timing.gather_seconds}
        while (reply := self._send("ask", request, timing.ask_seconds)).get("held") and not self._closed.is_set():
            pass
        if refused := reply.get("refused"):
            raise NameTaken(
                f"islands.name: the lighthouse at {self.address} refuses this island: {refused}. If that is a process "
                "of this island that is about to end, the same command works later; otherwise give another name."
            )
        if (view := reply.get("view")) is None:
            raise RequestDropped(f"The lighthouse at {self.address} has dropped the request.")
        return view["id"], read_texts(view["headers"])

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
        interval = wait = self._timing.heartbeat_seconds / BEATS_PER_TIMEOUT
        while not self._closed.wait(max(wait, 0.0)):
            began = time.monotonic()
            self.last_heartbeat = self._say("beat", self._status)
            wait = interval - (time.monotonic() - began)

    def _say(self, kind: str, content: dict) -> Heartbeat:
        try:
            return Heartbeat(held=str(self._send(kind, content, self._timing.network_seconds).get("held", "")))
        except (CoordinatorUnreachable, NotAdmitted) as error:
            self.revoked = error if isinstance(error, Revoked) else None
            return Heartbeat(str(error))

    def _send(self, kind: str, content: dict, wait_seconds: float) -> dict:
        message = {"format": FORMAT, "kind": kind, "name": self.name, "session": self._session, **content}
        message["heartbeat_seconds"] = self._timing.heartbeat_seconds
        return self._pool.request(message, wait_seconds)


class ConnectionPool:
    """Connections to the coordinator, for several threads. Each request takes the longest idle one.

    So heartbeats keep all of them open, and none has to compete with unidentified connections for a slot.

    - `has_met`: whether the coordinator has ever accepted a request
    """

    def __init__(self, address: str, token: bytes):
        self.has_met = False
        self._address, self._token, self._revoked = address, token, tls_contexts(token).revoked
        self._more: dict = {}  # with the next request: revocations that the coordinator does not know
        self._kept: deque[PeerClient] = deque()
        self._closings = 0

    def request(self, message: dict, wait_seconds: float) -> dict:
        """Return the coordinator's reply. Raises CoordinatorUnreachable or NotAdmitted."""
        closings = self._closings
        message = {**message, **self._more, "revoked": self._revoked.digest()}
        try:
            peer = self._kept.popleft()
        except IndexError:
            peer = PeerClient(f"{self._address}/{NAME}", self._token, CONNECT_SECONDS)
        try:
            reply = peer.request("POST", "/message", canonical(message), LARGEST_VIEW_BYTES, wait_seconds)
        except (PeerUnreachable, RequestRejected) as error:
            peer.close()
            self.close()  # the coordinator may have started again, which breaks the others too
            raise self._failure(error) from None
        self.has_met, known = True, reply.get("revocations")
        self._revoked.take(known or {})
        self._more = {} if known in (None, own := self._revoked.to_json()) else {"revocations": own}
        if closings == self._closings:
            self._kept.append(peer)
        else:
            peer.close()
        return reply

    def close(self) -> None:
        """Close the connections that no request uses; the others are closed with their requests."""
        self._closings += 1
        with suppress(IndexError):
            while True:
                self._kept.popleft().close()

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, KeyRevoked):
            return Revoked(
                f"islands.token_file: the lighthouse at {error}. This island ends, the others go on. With a new key, "
                "which `gregale islands key` makes, it comes back."
            )
        if not isinstance(error, WrongServer | RequestRejected):
            return CoordinatorUnreachable(f"The lighthouse at {error}")
        if self.has_met:
            return CoordinatorRefuses(f"The lighthouse at {self._address} refuses a request: {error}")
        hint = " See that islands.token_file is the same everywhere." if "token" in str(error) else ""
        return NotAdmitted(f"islands.lighthouse: the lighthouse at {error}.{hint}")
