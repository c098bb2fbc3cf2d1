"""The server of each host: serves its state to joiners, accepts small messages and returns its status. HTTP, signed.

A published array must never be changed in place: a commit publishes new arrays. Unchanged arrays may be shared.

A request is signed over its recipient, method, path, time, single-use nonce and body hash. The server checks the
signature before it reads the body; a wrong one gets an empty refusal. The recipient is the last part of `address`, a
word that every server draws at its start. So no other server accepts a captured request, and the same one does not
accept it twice, nor after a restart at the same port. A connection without a complete signed request within
`IDLE_SECONDS` is closed (`listener`). Replies are signed over the request's nonce, or are chunks whose hashes are in a
signed manifest. Nothing is encrypted.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import Any, cast

from gregale.distributed.signing import canonical, digest, is_signed, sign
from gregale.errors import UserError
from gregale.islands.transport.client import STATUS_PATH, RequestRejected
from gregale.islands.transport.listener import CLOCKS_APART_SECONDS, IDLE_SECONDS, Listener, Nonces, RateLimitedLines
from gregale.islands.transport.snapshot_store import SnapshotStore, bytes_of, chunk_span

SEND_BYTES = 256 << 10
POLL_SECONDS = 0.2  # between two checks whether the server was closed
SETTLE_SECONDS = 3.0  # a joiner's wait for the end of a round in one request; less than its STALL_SECONDS
LARGEST_BODY_BYTES = 1 << 20
LARGEST_HEAD_BYTES = 8 << 10
LARGEST_VALUE_BYTES = 64 << 10
MAX_VALUES = 4096
KEPT_SECONDS = 120.0


class Server:
    """Listens on `host` from the start until `close`, at `port` (0: any); `bind` is `host` or `host:port`.

    `outer` serves the outer state, `inner` the inner optimizer for a joining island. Raises UserError if it cannot
    listen at the address.

    - `on_message`: called in a thread of the server with a peer's JSON object; returns the reply, or raises
      RequestRejected
    - `status`: called for GET /status
    - `complain`: receives a line for a rejected request (at most a few a minute)
    - `key`: the name of the setting `bind`
    - `alias`: a fixed recipient for clients that do not have the address yet; it works for GET /status only
    """

    def __init__(
        self,
        bind: str,
        token: bytes,
        on_message: Callable[[dict], dict | bytes],
        status: Callable[[], dict] = dict,
        complain: Callable[[str], None] = lambda line: None,
        key: str = "islands.bind",
        alias: str | None = None,
    ):
        self.host, _, port = bind.partition(":")
        self.token, self.on_message, self.status = token, on_message, status
        self.outer, self.inner, self.mailbox = SnapshotStore(), SnapshotStore(), Mailbox()
        self.nonces, self.complain = Nonces(), RateLimitedLines(complain)
        self.recipient, self.alias = secrets.token_hex(8), alias
        try:
            self._http = Listener((self.host, int(port or 0)), partial(Handler, owner=self), self.complain)
        except OSError as error:
            raise UserError(f"{key}: {bind} cannot be listened at ({error.strerror}).") from None
        self.port = self._http.server_address[1]
        self.address = f"{self.host}:{self.port}/{self.recipient}"
        threading.Thread(
            target=self._http.serve_forever, args=(POLL_SECONDS,), name="gregale-server", daemon=True
        ).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.end_all()


class Head:
    """The header lines of a request, limited in total; the standard library's limit is 100 times 64 KiB."""

    def __init__(self, stream: BufferedIOBase):
        self._stream, self._left = stream, LARGEST_HEAD_BYTES

    def readline(self, size: int) -> bytes:
        """Return the next line; raise `HTTPException` when there are too many bytes."""
        line = self._stream.readline(min(size, self._left))
        self._left -= len(line)
        if not self._left:
            raise HTTPException("the headers are too large")
        return line


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a reply's body waits a round trip for the acknowledgement of its headers
    timeout = IDLE_SECONDS
    server: Listener
    nonce = ""

    def __init__(self, request: Any, client_address: Any, listener: Listener, owner: Server):
        self.owner = owner
        super().__init__(request, client_address, listener)

    def parse_request(self) -> bool:
        """Parse a request as the parent does, with a limit on all headers together."""
        whole, self.rfile = self.rfile, cast(BufferedIOBase, Head(self.rfile))
        try:
            return super().parse_request()
        finally:
            self.rfile = whole

    def do_GET(self) -> None:
        self._answer(
            {
                "/manifest": lambda body: self._manifest(self.owner.outer, 0.0),
                "/manifest/settled": lambda body: self._manifest(self.owner.outer, SETTLE_SECONDS),
                "/manifest/inner": lambda body: self._manifest(self.owner.inner, 0.0),
                STATUS_PATH: lambda body: self.owner.status(),
            }
        )

    def do_POST(self) -> None:
        self._answer({"/message": self._message, "/store": self.owner.mailbox.post})

    def _answer(self, routes: dict[str, Callable[[bytes], dict | bytes]]) -> None:
        try:
            body = self._read_signed()
            if (self.command, self.path) == ("POST", "/pieces"):
                self._send_chunks(body)
                return
            if self.path not in routes:
                raise RequestRejected("there is nothing at this path")
            reply = routes[self.path](body)
        except RequestRejected as refusal:
            self.owner.complain(f"{self.client_address[0]} was refused: {refusal}")
            self._reply(403, canonical({"refused": str(refusal)}) if self.nonce else b"")
        else:
            self._reply(200, reply if isinstance(reply, bytes) else canonical(reply))
        self.server.set_deadline(self.connection, IDLE_SECONDS)

    def _read_signed(self) -> bytes:
        """Return the body of a request with the token's signature; raise RequestRejected."""
        owner, header, self.nonce = self.owner, self.headers.get, ""
        is_last, self.close_connection = self.close_connection, True  # until the request has passed all checks
        nonce, moment, hashed = header("X-Nonce", ""), header("X-Time", ""), header("X-Body", "")
        signed = (self.command, self.path, moment, nonce, hashed)
        names = (owner.recipient, owner.alias) if owner.alias and self.path == STATUS_PATH else (owner.recipient,)
        signature, parts = header("X-Signature", ""), [part.encode() for part in signed]
        if not any(is_signed(owner.token, signature, name.encode(), *parts) for name in names):
            raise RequestRejected(
                "its signature is missing or wrong: it has another token, or was meant for another server"
            )
        if not self.server.admit(self.connection):
            raise RequestRejected("the server has no free connection slot")
        self.nonce = nonce
        apart = abs(time.time() - float(moment))
        if apart > CLOCKS_APART_SECONDS:
            raise RequestRejected(f"its clock is {apart:.0f} s away from this one: set them right")
        if not owner.nonces.take(nonce):
            raise RequestRejected("this request was already used")
        length = header("Content-Length", "0")
        if not (length.isdecimal() and int(length) <= LARGEST_BODY_BYTES):
            raise RequestRejected(f"its body has {length} bytes; at most {LARGEST_BODY_BYTES} are taken")
        body = self.rfile.read(int(length))
        if digest(body) != hashed:
            raise RequestRejected("its body is not the one that was signed")
        self.close_connection = is_last
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
        self.send_response_only(200)
        self.send_header("Content-Length", str(sum(stop - start for start, stop in spans)))
        self.end_headers()
        for (name, _), (start, stop) in zip(wanted, spans, strict=True):
            store.keep(name, arrays[name])
            self._send_all(bytes_of(arrays[name])[start:stop])
        self.server.set_deadline(self.connection, IDLE_SECONDS)

    def _send_all(self, content: bytes | memoryview) -> None:
        for offset in range(0, len(content), SEND_BYTES):
            self.server.set_deadline(self.connection, 2 * IDLE_SECONDS)
            self.connection.sendall(content[offset : offset + SEND_BYTES])

    def _reply(self, code: int, body: bytes) -> None:
        # A client without a valid signature gets no signature, because there is no nonce, and no information.
        self.send_response_only(code)
        self.send_header("Content-Length", str(len(body)))
        if self.nonce:
            proof = sign(self.owner.token, b"reply", self.nonce.encode(), str(code).encode(), body)
            self.send_header("X-Signature", proof)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self._send_all(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject a request that is not HTTP; the standard library calls this."""
        self.close_connection = True
        self.owner.complain(f"{self.client_address[0]} was refused: it does not speak HTTP ({code})")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Mailbox:
    """A limited number of values by (group, key); a thread that waits for one wakes when it arrives."""

    def __init__(self):
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._cancelled: set[str] = set()

    def post(self, body: bytes) -> dict:
        """Store a peer's value: JSON with group, key and the value as hexadecimal digits."""
        posted = json.loads(body)
        self.put(posted["group"], posted["key"], bytes.fromhex(posted["value"]))
        return {}

    def put(self, group: str, key: str, value: bytes) -> None:
        with self._changed:
            oldest = time.monotonic() - KEPT_SECONDS
            self._values = {name: kept for name, kept in self._values.items() if kept[0] > oldest}
            if len(value) > LARGEST_VALUE_BYTES or len(self._values) >= MAX_VALUES:
                raise RequestRejected("there is no room for this value")
            self._values[group, key] = time.monotonic(), value
            self._changed.notify_all()

    def get(self, group: str, key: str, timeout_seconds: float) -> bytes | None:
        """Return the value; wait for it. None after the timeout, or if the group is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: (group, key) in self._values or group in self._cancelled, timeout_seconds)
            kept = None if group in self._cancelled else self._values.get((group, key))
            return None if kept is None else kept[1]

    def cancel(self, group: str) -> None:
        """Cancel all waits for this group's values, until `forget`."""
        with self._changed:
            self._cancelled.add(group)
            self._changed.notify_all()

    def is_cancelled(self, group: str) -> bool:
        return group in self._cancelled

    def forget(self, group: str) -> None:
        with self._changed:
            self._cancelled.discard(group)
            self._values = {name: kept for name, kept in self._values.items() if name[0] != group}
