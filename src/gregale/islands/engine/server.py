"""Each host's own server: hands its state to joiners, takes small messages and tells how it does. HTTP, authenticated.

    server = Server("127.0.0.1", token, on_message=handle, status=lambda: {"step": 12})
    server.publish(Snapshot(generation=0, round=4, leaves={"wte|0": Leaf(array, version=3)}, facts={"data": ...}))
    server.address                              # "127.0.0.1:41230"
    call(peer, token, {"kind": "due", "round": 5}, timeout_seconds=2.0)    # returns what the peer's on_message returned
    ask_status(peer, token, timeout_seconds=2.0)
    server.close()

A published array must never be changed in place: a commit publishes new arrays. Unchanged arrays may be shared. `call`
and `ask_status` are in `client.py`, `Snapshot` and `Leaf` in `state.py`.

Who has no token gets nothing done: a request is signed over method, path, time, a nonce that is taken once, and
the hash of its body; that is checked before the body is read. A connection that has not brought a whole, signed request
within `PATIENCE_SECONDS` is closed. Replies are signed over the request's nonce, or are pieces whose hashes stand in a
signed manifest. Nothing is encrypted.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gregale.errors import UserError
from gregale.islands.engine.client import PeerUnreachable, Refused, ask_status, call
from gregale.islands.engine.mailbox import Mailbox
from gregale.islands.engine.signing import canonical, digest
from gregale.islands.engine.state import Leaf, Shelf, Snapshot, bytes_of, piece_span
from gregale.services.signing import is_signed, sign

__all__ = ["Leaf", "PeerUnreachable", "Refused", "Server", "Snapshot", "ask_status", "call"]

PATIENCE_SECONDS = 10.0
SEND_BYTES = 256 << 10
SETTLE_SECONDS = 3.0  # that a joiner waits for the end of a round in one request; less than its STALL_SECONDS
LARGEST_BODY_BYTES = 1 << 20
MOST_CONNECTIONS = 128
CLOCKS_APART_SECONDS = 300.0
COMPLAINTS_PER_SECOND = 2.0


class Server:
    """Listens on `host` from the start until `close`, at `port` (0: any); `bind` is `host` or `host:port`.

    - `on_message`: called in a thread of the server with a peer's JSON object; what it returns is the reply; may raise
      Refused
    - `status`: called for GET /status
    - `complain`: gets one line for each refused request (at most a few a second)

    Raises UserError where the address cannot be had.
    """

    def __init__(
        self,
        bind: str,
        token: bytes,
        on_message: Callable[[dict], dict],
        status: Callable[[], dict] = dict,
        complain: Callable[[str], None] = lambda line: None,
    ):
        self.host, _, port = bind.partition(":")
        self.token, self.on_message, self.status = token, on_message, status
        self.shelf, self.mailbox = Shelf(), Mailbox()
        self.nonces = Nonces()
        self._complain, self._complained = complain, 0.0
        try:
            self._http = Listener((self.host, int(port or 0)), self)
        except OSError as error:
            raise UserError(f"islands.bind: {bind} cannot be listened at ({error.strerror}).") from None
        self.address = f"{self.host}:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.2,), name="gregale-server", daemon=True).start()

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces the state that is served. A joiner that has begun with the former one may finish it."""
        self.shelf.publish(snapshot)

    def complain(self, line: str) -> None:
        if time.monotonic() - self._complained >= 1 / COMPLAINTS_PER_SECOND:
            self._complained = time.monotonic()
            self._complain(line)

    def close(self) -> None:
        """Stops listening, and ends the connections that there are."""
        self._http.shutdown()
        self._http.server_close()
        self._http.end_all()


class Nonces:
    """Each nonce is taken once, within the time that clocks may be apart."""

    def __init__(self):
        self._lock = threading.Lock()
        self._taken: dict[str, float] = {}

    def take(self, nonce: str) -> bool:
        now = time.monotonic()
        with self._lock:
            while self._taken and now - next(iter(self._taken.values())) > 2 * CLOCKS_APART_SECONDS:
                del self._taken[next(iter(self._taken))]
            if nonce in self._taken:
                return False
            self._taken[nonce] = now
            return True


class Listener(ThreadingHTTPServer):
    """Threads for a bounded number of connections, each of which is closed when it says nothing of use in time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], owner: Server):
        self.owner = owner
        self._lock = threading.Lock()
        self._deadlines: dict[Any, float] = {}
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        # The parent's looks up the host's name, which takes seconds where no name server answers.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._deadlines) >= MOST_CONNECTIONS
            if not is_full:
                self._deadlines[request] = time.monotonic() + PATIENCE_SECONDS
        if is_full:
            self.owner.complain(f"{client_address[0]} was refused: there are {MOST_CONNECTIONS} connections")
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def set_deadline(self, request: Any, seconds: float) -> None:
        with self._lock:
            if request in self._deadlines:
                self._deadlines[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Called several times a second."""
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if time.monotonic() > deadline]
        for request in late:
            self._end(request)

    def end_all(self) -> None:
        with self._lock:
            requests = list(self._deadlines)
        for request in requests:
            self._end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # else the client has gone
            self.owner.complain(f"{client_address[0]}: a request ended in {error!r}")

    @staticmethod
    def _end(request: Any) -> None:
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has gone on its own


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a reply's body waits a round trip for the acknowledgement of its headers
    timeout = PATIENCE_SECONDS
    server: Listener
    nonce = ""

    def do_GET(self) -> None:
        self._answer(
            {
                "/manifest": lambda body: self._manifest(0.0),
                "/manifest/settled": lambda body: self._manifest(SETTLE_SECONDS),
                "/status": lambda body: self.server.owner.status(),
            }
        )

    def do_POST(self) -> None:
        self._answer({"/message": self._message, "/store": self.server.owner.mailbox.post})

    def _answer(self, routes: dict[str, Callable[[bytes], dict]]) -> None:
        try:
            body = self._read_signed()
            if (self.command, self.path) == ("POST", "/pieces"):
                self._send_pieces(body)
                return
            if self.path not in routes:
                raise Refused("there is nothing at this path")
            reply = routes[self.path](body)
        except Refused as refusal:
            self.server.owner.complain(f"{self.client_address[0]} was refused: {refusal}")
            self._reply(403, canonical({"refused": str(refusal)}))
        else:
            self._reply(200, canonical(reply))
        self.server.set_deadline(self.connection, PATIENCE_SECONDS)

    def _read_signed(self) -> bytes:
        """The body of a request with the token's signature."""
        owner, header = self.server.owner, self.headers.get
        is_last, self.close_connection = self.close_connection, True  # until the request has proved good
        nonce, moment, hashed = header("X-Nonce", ""), header("X-Time", ""), header("X-Body", "")
        signed = (self.command, self.path, moment, nonce, hashed)
        if not is_signed(owner.token, header("X-Signature", ""), *(part.encode() for part in signed)):
            raise Refused("its signature is missing or wrong: does it have another token?")
        self.nonce = nonce
        apart = abs(time.time() - float(moment))
        if apart > CLOCKS_APART_SECONDS:
            raise Refused(f"its clock is {apart:.0f} s away from this one: set them right")
        if not owner.nonces.take(nonce):
            raise Refused("this request was here before")
        length = header("Content-Length", "0")
        if not (length.isdecimal() and int(length) <= LARGEST_BODY_BYTES):
            raise Refused(f"its body has {length} bytes; at most {LARGEST_BODY_BYTES} are taken")
        body = self.rfile.read(int(length))
        if digest(body) != hashed:
            raise Refused("its body is not the one that was signed")
        self.close_connection = is_last
        return body

    def _manifest(self, wait_seconds: float) -> dict:
        # Hashing a large state takes its time.
        self.server.set_deadline(self.connection, float("inf"))
        manifest = self.server.owner.shelf.manifest(wait_seconds)
        if manifest is None:
            raise Refused("there is no state here yet")
        return manifest

    def _message(self, body: bytes) -> dict:
        self.server.set_deadline(self.connection, float("inf"))  # it may be told at the end of a step only
        message = json.loads(body)
        if not isinstance(message, dict):
            raise Refused("a message is a JSON object")
        return self.server.owner.on_message(message)

    def _send_pieces(self, body: bytes) -> None:
        """Reply with pieces one after the other: one request for many of them, so that the link never idles."""
        shelf = self.server.owner.shelf
        try:
            wanted = [(str(name), int(index)) for name, index in json.loads(body)]
            arrays = shelf.lend({name for name, _ in wanted})
            spans = [piece_span(arrays[name].nbytes, index) for name, index in wanted] if arrays else []
        except (TypeError, ValueError) as error:
            raise Refused(f"pieces are requested as a list of [hash, index] ({error})") from None
        if arrays is None:
            self._reply(404, canonical({"refused": "an array is not here any more"}))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(sum(stop - start for start, stop in spans)))
        self.end_headers()
        for (name, _), (start, stop) in zip(wanted, spans, strict=True):
            self._send_all(bytes_of(shelf.bring(name, arrays[name]))[start:stop])
        self.server.set_deadline(self.connection, PATIENCE_SECONDS)

    def _send_all(self, content: bytes | memoryview) -> None:
        for offset in range(0, len(content), SEND_BYTES):
            self.server.set_deadline(self.connection, 2 * PATIENCE_SECONDS)
            self.connection.sendall(content[offset : offset + SEND_BYTES])

    def _reply(self, code: int, body: bytes) -> None:
        # A refusal is not signed for who has not shown that it has the token: there is no nonce.
        proof = sign(self.server.owner.token, b"reply", self.nonce.encode(), str(code).encode(), body)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if self.nonce:
            self.send_header("X-Signature", proof)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self._send_all(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library calls for what is not HTTP."""
        self.close_connection = True
        self.server.owner.complain(f"{self.client_address[0]} was refused: it does not speak HTTP ({code})")

    def version_string(self) -> str:
        return "gregale"

    def log_message(self, format: str, *args: Any) -> None:
        pass
