"""Requests to peers' servers, over TLS connections of the fleet."""

import json
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from gregale.atomic_files import os_error_text
from gregale.distributed.agreement import canonical
from gregale.islands.transport.tls import PeerRefused, check_peer, tls_contexts

LARGEST_REPLY_BYTES = 1 << 20
RECIPIENT = "X-Recipient"
STATUS_PATH, STREAM_PATH = "/status", "/stream"
IDLE_SECONDS = 40.0  # less than a server's KEPT_SECONDS
OUTWARDS = "outwards:"  # begins the address of a host that only connects outwards; then its recipient
Dial = Callable[[str, float], ssl.SSLSocket]


class PeerUnreachable(Exception):
    """A peer did not answer in time, or is not the expected server."""


class WrongServer(PeerUnreachable):
    """The server at the address has another token, or is not the expected one."""


class RequestRejected(Exception):
    """A peer rejected the request, with its reason (unknown message, ...)."""


class KeyRevoked(RequestRejected):
    """A peer rejects this process, because its key was revoked."""


class PeerClient:
    """A connection to a peer's server, for one request after the other. Use it in one thread, and close it.

    - `address`: HOST:PORT/RECIPIENT, as `Server.address`; only the server with this recipient answers, and only if it
      may speak for the name in it (`island_at`)
    - `timeout_seconds`: for connecting, and for each wait for bytes
    - `dial`: opens connections to hosts that only connect outwards (`Paths.dial`)
    """

    def __init__(self, address: str, token: bytes, timeout_seconds: float, dial: Dial | None = None):
        self.full_address = address
        self.address, _, self._recipient = address.partition("/")
        self._name, self._token = island_at(address), token
        self._timeout_seconds, self._dial = timeout_seconds, dial
        host = OUTWARDS if self.address.startswith(OUTWARDS) else self.address
        self._connection = HTTPSConnection(host, timeout=timeout_seconds, context=tls_contexts(token).client)
        self._used = time.monotonic()
        self._response: Any = None

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        largest_reply_bytes: int = LARGEST_REPLY_BYTES,
        wait_seconds: float | None = None,
    ) -> dict:
        """Return the JSON object of a reply within `wait_seconds`. Raises PeerUnreachable or RequestRejected."""
        try:
            response = self._send(method, path, body, wait_seconds)
            length = int(response.headers.get("Content-Length") or 0)
            if length > largest_reply_bytes:
                self.close()
                raise RequestRejected(
                    f"{self.address} offers {length} bytes for {path}; at most {largest_reply_bytes} are expected"
                )
            content = response.read(length)
            if len(content) < length:
                raise OSError("the connection ended in the middle")
        except (OSError, HTTPException, ValueError, PeerRefused) as error:
            raise self._unreachable(error) from None
        if response.status == HTTPStatus.MISDIRECTED_REQUEST:
            raise WrongServer(f"{self.address} is not the expected server, or has started again")
        if not content.startswith(b"{"):  # it is compressed
            content = zlib.decompressobj().decompress(content, largest_reply_bytes)
        reply = json.loads(content)
        if response.status != 200:
            kind = KeyRevoked if response.status == HTTPStatus.UNAUTHORIZED else RequestRejected
            raise kind(f"{self.address} refuses: {reply.get('refused', response.status)}")
        return reply

    def open_chunks(self, chunks: Sequence[tuple[str, int]], size: int) -> bool:
        """Request chunks (hash of the leaf, index) of `size` bytes in all; `read_into` reads them in this order.

        Returns False if the peer no longer has one of the leaves. Raises PeerUnreachable.
        """
        try:
            response = self._send("POST", "/pieces", canonical([list(chunk) for chunk in chunks]))
            if response.status == 404:
                response.read(LARGEST_REPLY_BYTES)
                return False
            if response.status != 200 or response.headers.get("Content-Length") != str(size):
                raise OSError("it sends something other than the requested chunks")
        except (OSError, HTTPException, ValueError, PeerRefused) as error:
            raise self._unreachable(error) from None
        return True

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the requested chunks; check their hash. Raises PeerUnreachable."""
        try:
            fill(target, self._response.readinto)
        except (OSError, HTTPException, ValueError, PeerRefused) as error:
            raise self._unreachable(error) from None

    def open_stream(self, greeting: dict, wait_seconds: float) -> socket.socket:
        """Return the connection for messages to a group of the peer. Raises PeerUnreachable or RequestRejected."""
        self.request("POST", STREAM_PATH, canonical(greeting), wait_seconds=wait_seconds)
        stream = self.release()
        stream.settimeout(None)
        return stream

    def release(self) -> ssl.SSLSocket:
        """Return the open connection, which the caller closes; the next request opens another one."""
        stream, self._connection.sock = self._connection.sock, None
        return stream

    def connect(self) -> None:
        """Open the connection ahead of its next request, if it is not open. Raises PeerUnreachable."""
        try:
            self._open()
        except (OSError, PeerRefused) as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        self._connection.close()
        if self._response is not None:
            self._response.close()  # it keeps the socket until it has been read

    def _open(self) -> None:
        if time.monotonic() - self._used > IDLE_SECONDS:
            self._connection.close()  # a server closes an idle connection
        if self._connection.sock is None:
            if not self.address.startswith(OUTWARDS):
                self._connection.connect()
            elif self._dial is not None:
                self._connection.sock = self._dial(self._recipient, self._timeout_seconds)
            else:
                raise OSError("it only connects outwards")
            self._used = time.monotonic()
        # Also of an open connection, because a key may be revoked meanwhile.
        check_peer(self._token, self._connection.sock, self._name)

    def _send(self, method: str, path: str, body: bytes, wait_seconds: float | None = None) -> HTTPResponse:
        self._open()
        opened: Any = self._connection.sock  # `connect` has set it
        opened.settimeout(self._timeout_seconds if wait_seconds is None else wait_seconds)
        fields = f"{RECIPIENT}: {self._recipient}\r\nContent-Length: {len(body)}"
        opened.sendall(f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)  # in one TLS record
        response = self._response = HTTPResponse(opened, method=method)
        response.begin()
        self._used = time.monotonic()
        return response

    def _unreachable(self, error: Exception) -> PeerUnreachable:
        self.close()
        if isinstance(error, PeerRefused):
            return WrongServer(f"{self.address} is not accepted: {error}")
        if isinstance(error, ssl.SSLCertVerificationError):
            return WrongServer(f"{self.address} does not have this fleet's certificate: it has another token")
        if isinstance(error, TimeoutError):  # whose texts name functions of the standard library
            return PeerUnreachable(f"{self.address} cannot be reached: timed out")
        reason = "the TLS connection broke" if isinstance(error, ssl.SSLError) else os_error_text(error)
        return PeerUnreachable(f"{self.address} cannot be reached: {reason}")


def island_at(address: str) -> str:
    """Return the name in an address (HOST:PORT/NAME:WORD) of a server; empty if it has none."""
    return address.partition("/")[2].partition(":")[0]


def fill(target: memoryview, read: Callable[[memoryview], int]) -> None:
    """Fill `target` with the bytes of `read`, which returns their number. Raises OSError if they end before."""
    while target:
        if not (count := read(target)):
            raise OSError("the connection ended in the middle")
        target = target[count:]


def call(address: str, token: bytes, message: dict, timeout_seconds: float, dial: Dial | None = None) -> dict:
    """Send a small JSON object to a peer; return its reply. Raises PeerUnreachable or RequestRejected."""
    with closing(PeerClient(address, token, timeout_seconds, dial)) as peer:
        return peer.request("POST", "/message", canonical(message))


def ask_status(address: str, token: bytes, timeout_seconds: float, dial: Dial | None = None) -> dict:
    """Return a peer's `status`. Raises PeerUnreachable or RequestRejected."""
    with closing(PeerClient(address, token, timeout_seconds, dial)) as peer:
        return peer.request("GET", STATUS_PATH)
