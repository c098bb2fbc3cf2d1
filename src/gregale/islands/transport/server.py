"""The server of each host: serves its state to joiners, accepts messages and streams, returns its status. HTTP in TLS.

A published array must never be changed in place: a commit publishes new arrays. Unchanged arrays may be shared.

Only the fleet's members get through the TLS handshake (`tls`), within `IDLE_SECONDS` (`listener`). A message with a
`name` is taken only from a peer that may speak for it. A request names its recipient: the last part of `address`, which
is the name of the server's island and a word that the server draws at its start. So no server answers in the place of
another, nor of one that had its port before.
"""

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from socket import socket
from socketserver import StreamRequestHandler
from typing import Any

from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.islands.transport.client import OUTWARDS, RECIPIENT, STATUS_PATH, STREAM_PATH, RequestRejected
from gregale.islands.transport.listener import IDLE_SECONDS, KEPT_SECONDS, Listener, RateLimitedLines
from gregale.islands.transport.outwards import PARK_PATH, PARK_SECONDS, RELAY_PATH, Paths, relay
from gregale.islands.transport.tls import PeerRefused, PeerRevoked, check_peer
from gregale.islands.transport.transfer import SnapshotStore, bytes_of, chunk_span

SEND_BYTES = 256 << 10
POLL_SECONDS = 0.2  # between two checks whether the server was closed
SETTLE_SECONDS = 3.0  # a joiner's wait for the end of a round in one request; less than its STALL_SECONDS
LARGEST_BODY_BYTES = 1 << 20
LONGEST_STREAM_WAIT_SECONDS = 120.0
MOST_LINES, LONGEST_LINE_BYTES = 20, 1000  # of the head of a request


@dataclass(frozen=True)
class Endpoint:
    """Who a server is, where it listens, and where peers reach it.

    - `bind`: `host` or `host:port` to listen at; without a port, or with port 0, any free one
    - `key`: the name of the setting `bind`
    - `address`: HOST:PORT at which peers reach it; `outwards`: at none; None: where it listens
    - `name`: of its island
    - `recipient`: for clients that do not have the whole address; None: `name` and a random word
    """

    bind: str
    key: str = "islands.bind"
    address: str | None = None
    name: str = ""
    recipient: str | None = None


class Server:
    """Listens at `host` and `port` from the start until `close`.

    `outer` serves the outer state, `inner` the inner optimizer for a joining island. Raises UserError if it cannot
    listen at the address.

    - `on_message`: called in a thread of the server with a peer's JSON object; returns the reply, or raises
      RequestRejected
    - `status`: called for GET /status
    - `complain`: receives a line for a rejected request (at most a few a minute)
    - `inside_address`: at which the other hosts of this island reach it
    - `relays`: how many relays it carries at once
    - `paths`: to peers, and from them
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: bytes,
        on_message: Callable[[dict], dict | bytes],
        status: Callable[[], dict] = dict,
        complain: Callable[[str], None] = lambda line: None,
        relays: int = 0,
    ):
        self.host, _, port = endpoint.bind.partition(":")
        self.token, self.on_message, self.status = token, on_message, status
        self.outer, self.inner, self.groups = SnapshotStore(), SnapshotStore(), Groups()
        self.complain = RateLimitedLines(complain)
        self.recipient = endpoint.recipient or f"{endpoint.name}:{secrets.token_hex(8)}"
        self.relays = threading.Semaphore(relays)
        self.paths = Paths(
            token, self.recipient, lambda stream: self._http.process_request(stream, stream.getpeername())
        )
        handler = partial(Handler, owner=self)
        try:
            self._http = Listener((self.host, int(port or 0)), handler, token, self.complain)
        except OSError as error:
            raise UserError(f"{endpoint.key}: {endpoint.bind} cannot be listened at ({error.strerror}).") from None
        self.port = self._http.server_address[1]
        own = f"{self.host}:{self.port}"
        is_outwards = endpoint.address == "outwards"
        self.address = f"{OUTWARDS + self.recipient if is_outwards else endpoint.address or own}/{self.recipient}"
        self.inside_address = f"{own}/{self.recipient}" if is_outwards else self.address
        threading.Thread(
            target=self._http.serve_forever, args=(POLL_SECONDS,), name="gregale-server", daemon=True
        ).start()

    def close(self) -> None:
        self.paths.close()
        self._http.shutdown()
        self._http.server_close()
        self._http.end_all()


class Handler(StreamRequestHandler):
    disable_nagle_algorithm = True  # otherwise a reply's body waits a round trip for the acknowledgement of its headers
    timeout = IDLE_SECONDS
    server: Listener

    def __init__(self, request: Any, client_address: Any, listener: Listener, owner: Server):
        self.owner = owner
        super().__init__(request, client_address, listener)

    def setup(self) -> None:
        super().setup()
        self.connection.do_handshake()
        if not self.server.admit(self.connection):
            raise ConnectionAbortedError("the server has no free connection slot")
        self.connection.settimeout(KEPT_SECONDS)

    def handle(self) -> None:
        """Answer requests until a side ends the connection."""
        self.close_connection = False
        while not self.close_connection and (first := self.rfile.readline(LONGEST_LINE_BYTES)):
            found = islice(iter(partial(self.rfile.readline, LONGEST_LINE_BYTES), b"\r\n"), MOST_LINES)
            lines = [line.decode("latin-1").rstrip() for line in found]
            if len(lines) == MOST_LINES:
                return
            self.fields = {name: value for name, _, value in (line.partition(": ") for line in lines)}
            self.command, self.path, *_ = [*first.decode("latin-1").split(), "", ""]
            self._answer()

    def _answer(self) -> None:
        outer, inner = self.owner.outer, self.owner.inner
        routes: dict[str, Callable[[bytes], dict | bytes | None]] = {
            "GET /manifest": lambda body: self._manifest(outer, 0.0),
            "GET /manifest/settled": lambda body: self._manifest(outer, SETTLE_SECONDS),
            "GET /manifest/inner": lambda body: self._manifest(inner, 0.0),
            f"GET {STATUS_PATH}": lambda body: self.owner.status(),
            "POST /message": self._message,
            "POST /pieces": self._send_chunks,
            f"POST {STREAM_PATH}": self._hand_over,
            f"POST {PARK_PATH}": self._park,
            f"POST {RELAY_PATH}": self._relay,
        }
        try:
            body = self._read_body()
            check_peer(self.owner.token, self.connection)  # again: its key may be revoked meanwhile
            if self.fields.get(RECIPIENT) != self.owner.recipient:
                self._reply(HTTPStatus.MISDIRECTED_REQUEST, b"")
                return
            if (route := routes.get(f"{self.command} {self.path}")) is None:
                raise RequestRejected("there is nothing at this path")
            reply = route(body)
        except (RequestRejected, PeerRefused) as refusal:
            self.owner.complain(f"{self.client_address[0]} was refused: {refusal}")
            status = HTTPStatus.UNAUTHORIZED if isinstance(refusal, PeerRevoked) else HTTPStatus.FORBIDDEN
            self._reply(status, canonical({"refused": str(refusal)}))
        else:
            if reply is not None:  # otherwise the route has replied
                self._reply(HTTPStatus.OK, reply if isinstance(reply, bytes) else canonical(reply))
        self.server.set_deadline(self.connection, KEPT_SECONDS)

    def _read_body(self) -> bytes:
        length = self.fields.get("Content-Length", "0")
        if not (length.isdecimal() and int(length) <= LARGEST_BODY_BYTES):
            self.close_connection = True
            raise RequestRejected(f"its body has {length} bytes; at most {LARGEST_BODY_BYTES} are taken")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError
        return body

    def _manifest(self, store: SnapshotStore, wait_seconds: float) -> dict:
        # Hashing a large state takes time.
        self.server.set_deadline(self.connection, float("inf"))
        manifest = store.manifest(wait_seconds)
        if manifest is None:
            raise RequestRejected("there is no state here yet")
        return manifest

    def _message(self, body: bytes) -> dict | bytes:
        self.server.set_deadline(self.connection, float("inf"))  # its answer may have to wait for the end of a step
        message = json.loads(body)
        if not isinstance(message, dict):
            raise RequestRejected("a message is a JSON object")
        if "name" in message:
            check_peer(self.owner.token, self.connection, message["name"])
        return self.owner.on_message(message)

    def _send_chunks(self, body: bytes) -> None:
        """Reply with the requested chunks; one request has many of them, so that the link never idles."""
        store, arrays = self.owner.outer, None
        try:
            wanted = [(str(name), int(index)) for name, index in json.loads(body)]
            for store in (self.owner.outer, self.owner.inner):
                if (arrays := store.lend({name for name, _ in wanted})) is not None:
                    break
            spans = [chunk_span(arrays[name].nbytes, index) for name, index in wanted] if arrays else []
        except (TypeError, ValueError) as error:
            raise RequestRejected(f"chunks are requested as a list of [hash, index] ({error})") from None
        if arrays is None:
            self._reply(404, canonical({"refused": "an array is not here any more"}))
            return
        self.connection.sendall(self._head(HTTPStatus.OK, sum(stop - start for start, stop in spans)))
        for (name, _), (start, stop) in zip(wanted, spans, strict=True):
            store.lend([name])
            self._send_all(bytes_of(arrays[name])[start:stop])

    def _hand_over(self, body: bytes) -> None:
        """Give the connection to a group, for the messages of one member, and return when the group ends."""
        greeting = json.loads(body)
        seconds = min(float(greeting["seconds"]), LONGEST_STREAM_WAIT_SECONDS)
        self.server.set_deadline(self.connection, seconds + IDLE_SECONDS)
        receive = self.owner.groups.find(greeting["group"], seconds)
        if receive is None:
            raise RequestRejected("the group has not come together here")
        self._reply(HTTPStatus.OK, b"{}")
        self.close_connection = True
        self.server.set_deadline(self.connection, float("inf"))
        self.connection.settimeout(None)
        receive(greeting["rank"], self.connection)

    def _park(self, body: bytes) -> dict | None:
        """Keep the connection for requests to the host that has opened it."""
        self.server.set_deadline(self.connection, PARK_SECONDS + IDLE_SECONDS)
        recipient = str(json.loads(body)["recipient"])
        check_peer(self.owner.token, self.connection, recipient.partition(":")[0])
        call = self.owner.paths.parking.wait(recipient, self.connection, PARK_SECONDS)
        if call is None:
            return {"called": False}
        self.close_connection = True
        self._reply(HTTPStatus.OK, canonical({"called": True, "relayed": call.relayed}))
        if call.relayed:
            self.server.set_deadline(self.connection, float("inf"))
        else:
            self.server.release(self.connection)
        call.use(self.connection)
        return None

    def _relay(self, body: bytes) -> None:
        request = json.loads(body)
        if not self.owner.relays.acquire(blocking=False):
            raise RequestRejected("it relays no more connections")
        try:
            seconds = min(float(request["seconds"]), LONGEST_STREAM_WAIT_SECONDS)
            self.server.set_deadline(self.connection, float("inf"))
            self.close_connection = True
            if not relay(self.connection, self.owner.paths.parking, str(request["recipient"]), seconds, self._begin):
                raise RequestRejected("the host only connects outwards, and has opened no connection to here")
        finally:
            self.owner.relays.release()

    def _begin(self) -> None:
        """Reply that a relay begins, which may then take any time."""
        self._reply(HTTPStatus.OK, b"{}")
        self.server.set_deadline(self.connection, float("inf"))

    def _send_all(self, content: bytes | memoryview) -> None:
        for offset in range(0, len(content), SEND_BYTES):
            self.server.set_deadline(self.connection, 2 * IDLE_SECONDS)
            self.connection.sendall(content[offset : offset + SEND_BYTES])

    def _reply(self, code: int, body: bytes) -> None:
        self._send_all(self._head(code, len(body)) + body)

    def _head(self, code: int, size: int) -> bytes:
        """Return the first bytes of a reply, to send in one TLS record with what follows."""
        close = "Connection: close\r\n" if self.close_connection else ""
        return f"HTTP/1.1 {code} \r\nContent-Length: {size}\r\n{close}\r\n".encode()


Receive = Callable[[int, socket], None]


class Groups:
    """The groups of this host by key: `receive(rank, stream)` of each takes the streams that its members open."""

    def __init__(self):
        self._changed = threading.Condition()
        self._receivers: dict[str, Receive] = {}

    def add(self, key: str, receive: Receive) -> None:
        with self._changed:
            self._receivers[key] = receive
            self._changed.notify_all()

    def find(self, key: str, seconds: float) -> Receive | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._receivers, seconds)
            return self._receivers.get(key)

    def remove(self, key: str) -> None:
        with self._changed:
            self._receivers.pop(key, None)
