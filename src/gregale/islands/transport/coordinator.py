"""The client of the coordinators (`lighthouse`): requests and heartbeats; `protocol.membership` has their rules."""

import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.islands.protocol.choice import Choice
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT, Record
from gregale.islands.protocol.messages import FORMAT, NO_ROUND, Columns, Heartbeat, Timing, read_texts, to_texts
from gregale.islands.transport.client import KeyRevoked, PeerClient, PeerUnreachable, RequestRejected, WrongServer
from gregale.islands.transport.lighthouse import LONGEST_REASON, NAME
from gregale.islands.transport.tls import tls_contexts
from gregale.storage import digest

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


def headers_of_fleet(addresses: Sequence[str], token: bytes) -> Columns:
    """Return the headers of the islands that run; empty if none runs, or no coordinator is reached.

    The process that asks does not join. Raises NotAdmitted.
    """
    message = {"format": FORMAT, "kind": "fleet"}
    for address in addresses:
        pool = ConnectionPool(address, token)
        try:
            if headers := read_texts(pool.request(message, CONNECT_SECONDS)["headers"]):
                return headers
        except CoordinatorUnreachable:
            pass
        finally:
            pool.close()
    return {}


class CoordinatorClient:
    """A member's client of the coordinators: sends heartbeats from threads until `close`, and reconnects by itself.

    - `addresses`: of one coordinator, or of several, the preferred ones first
    - `name`: of the member, unique in the fleet
    - `timing`: the coordinator takes its seconds from it
    - `session`: of this process; by default a new one
    - `saved`: the last state of the run, once this member has saved it and is about to end
    - `last_heartbeat`: the result of the newest heartbeat to the chosen coordinator (`choice`)
    - `revoked`: the error that ends this member, if its key was revoked
    """

    def __init__(
        self, addresses: Sequence[str] | str, name: str, token: bytes, timing: Timing, session: str | None = None
    ):
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        self.name, self.last_heartbeat = name, Heartbeat()
        self.revoked: Revoked | None = None
        self.saved: Record | None = None
        self._session, self._timing = session or secrets.token_hex(8), timing
        self._pools = [ConnectionPool(address, token) for address in self.addresses]
        self._choice, self._lock = Choice(len(self.addresses), timing.heartbeat_seconds), threading.Lock()
        self._numbers = itertools.count()
        self._status = {"round": NO_ROUND, "stalled": ""}
        self._run = ""  # a digest of what all members of the run agree on, by the newest request
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat, args=(index,), name="gregale-heartbeat", daemon=True)
            for index in range(len(self.addresses))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        return self.addresses[self._choice.current]

    def turned_to(self) -> str | None:
        """Return the address of the coordinator if requests go to another one from now on: the last one has failed."""
        with self._lock:
            return self.address if self._choice.look(time.monotonic()) else None

    def ask(self, header: dict, needed: int) -> tuple[int, Columns, int]:
        """Send this member's header (JSON; `name` is added); wait for a view of `needed` members or more.

        Return its id, which increases when the *membership* changes, the headers of its members, sorted by `name`, and
        its stamp (`View`).

        The coordinator holds the request, and confirms this every `hold_seconds`: then it is repeated with its number,
        and takes the view that was formed in between. Raises CoordinatorUnreachable, which may be retried,
        RequestDropped, and NotAdmitted or NameTaken.
        """
        timing = self._timing
        with self._lock:
            index, term, needed = self._choice.request(needed, header.get("round") == NO_ROUND)
        address = self.addresses[index]
        request = {"number": next(self._numbers), "needed": needed, "header": to_texts(header), "term": term}
        round, self._run = header.get("round"), digest(request["header"].get("agreement", "").encode())
        request["round"] = round if isinstance(round, int) else NO_ROUND  # members complain of the header
        request |= {"state": str(header.get("digest", "")), "recorded": str(header.get("recorded", ""))}
        request |= {"hold_seconds": timing.hold_seconds, "gather_seconds": timing.gather_seconds}
        while (reply := self._send(index, "ask", request, timing.ask_seconds)).get("held"):
            if self._closed.is_set():
                break
        if refused := reply.get("refused"):
            raise NameTaken(
                f"islands.name: the lighthouse at {address} refuses this island: {refused}. If that is a process "
                "of this island that is about to end, the same command works later; otherwise give another name."
            )
        if (view := reply.get("view")) is None:
            raise RequestDropped(f"The lighthouse at {address} has dropped the request.")
        return view["id"], read_texts(view["headers"]), view["stamp"]

    def report(self, round: int, stalled: str | None) -> None:
        """Report the committed round, and the reason of a stall, to the coordinator with the next heartbeats."""
        self._status = {"round": round, "stalled": (stalled or "")[:LONGEST_REASON]}

    def close(self) -> None:
        """Announce the leave, so that no member waits for this one, and stop. Wait for a request in progress."""
        if self._closed.is_set():
            return
        self._closed.set()
        until = time.monotonic() + LAST_REQUEST_SECONDS
        for index, (thread, pool) in enumerate(zip(self._threads, self._pools, strict=True)):
            thread.join(max(until - time.monotonic(), 0.0))
            if pool.has_met:
                self._say(index, "leave", {})
            pool.close()

    def _beat(self, index: int) -> None:
        interval = wait = self._timing.heartbeat_seconds / BEATS_PER_TIMEOUT
        while not self._closed.wait(max(wait, 0.0)):
            began = time.monotonic()
            with self._lock:
                here, met = index == self._choice.current, self._choice.is_heard(index, began)
            heartbeat = self._say(index, "beat", self._status | {"here": here, "met": met})
            if index == self._choice.current:
                self.last_heartbeat = heartbeat
            wait = interval - (time.monotonic() - began)

    def _say(self, index: int, kind: str, content: dict) -> Heartbeat:
        try:
            reply = self._send(index, kind, content, self._timing.network_seconds)
        except (CoordinatorUnreachable, NotAdmitted) as error:
            if isinstance(error, Revoked):
                self.revoked = error  # from now on, whatever another coordinator says
            return Heartbeat(str(error))
        rounds, state = reply.get("record") or (0, "")
        with self._lock:
            record = (int(rounds), str(state)) if state else None
            self._choice.answered(index, int(reply.get("hears", 0)), time.monotonic(), record)
            _, recorded = self._choice.recorded or (0, "")
        newest, behind = (int(reply.get(key, 0)) for key in ("newest", "behind"))
        return Heartbeat(held=str(reply.get("held", "")), newest=newest, behind=behind, recorded=recorded)

    def _send(self, index: int, kind: str, content: dict, wait_seconds: float) -> dict:
        message = {"format": FORMAT, "kind": kind, "name": self.name, "session": self._session, **content}
        message["heartbeat_seconds"] = self._timing.heartbeat_seconds
        with self._lock:
            message |= {"run": self._run, "record": self._choice.to_record(self.saved)}
        reply = self._pools[index].request(message, wait_seconds)
        with self._lock:
            self._choice.told(index, int(reply.get("term", 0)))
        return reply


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
