"""Requests to peers' servers, signed, with signed replies."""

from __future__ import annotations

import json
import secrets
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse

from gregale.islands.engine.signing import canonical, digest
from gregale.services.signing import is_signed, sign

LARGEST_REPLY_BYTES = 1 << 20


class PeerUnreachable(Exception):
    """A peer did not answer, or not in time; or answered without the token's signature."""


class Unsigned(PeerUnreachable):
    """Somebody answered without the token's signature: it has another token, or is not who was asked."""


class Refused(Exception):
    """A peer answered that it will not, and why (wrong token, clocks too far apart, unknown message)."""


class Peer:
    """A connection to a peer's server, for one request after the other. Use it in one thread, and close it.

    - `address`: HOST:PORT/RECIPIENT, as `Server.address`; the recipient is signed
    - `timeout_seconds`: for connecting, and for each wait for bytes
    """

    def __init__(self, address: str, token: bytes, timeout_seconds: float):
        self.address, _, self._recipient = address.partition("/")
        self._token = token
        self._connection = HTTPConnection(self.address, timeout=timeout_seconds)

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        largest_reply_bytes: int = LARGEST_REPLY_BYTES,
        wait_seconds: float | None = None,
    ) -> dict:
        """The JSON object of a signed reply, which may take `wait_seconds`. Raises PeerUnreachable or Refused."""
        try:
            if wait_seconds is not None:
                self._wait(wait_seconds)
            response, nonce = self._send(method, path, body, "")
            length = int(response.headers.get("Content-Length") or 0)
            if length > largest_reply_bytes:
                self.close()
                raise Refused(
                    f"{self.address} offers {length} bytes for {path}; at most {largest_reply_bytes} are expected"
                )
            content = response.read(length)
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        signature = response.headers.get("X-Signature", "")
        if not is_signed(self._token, signature, b"reply", nonce.encode(), str(response.status).encode(), content):
            raise Unsigned(
                f"{self.address} answers without this fleet's signature: it has another token, or started again"
            )
        reply = json.loads(content)
        if response.status != 200:
            raise Refused(f"{self.address} refuses: {reply.get('refused', response.status)}")
        return reply

    def read_into(self, path: str, start: int, target: memoryview) -> bool:
        """Fills `target` with bytes of a leaf from `start` on; False if the peer has that leaf no more.

        The bytes are nobody's word: check their hash. Raises PeerUnreachable.
        """
        try:
            response, _ = self._send("GET", path, b"", f"bytes={start}-{start + len(target) - 1}")
            if response.status == 404:
                response.read(LARGEST_REPLY_BYTES)
                return False
            if response.status != 206 or response.headers.get("Content-Length") != str(len(target)):
                self.close()
                raise PeerUnreachable(f"{self.address} sends something else than the range that was asked for")
            filled = 0
            while filled < len(target):
                count = response.readinto(target[filled:])
                if not count:
                    raise OSError("the connection ended in the middle")
                filled += count
            response.read()
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        return True

    def close(self) -> None:
        self._connection.close()

    def _wait(self, seconds: float) -> None:
        if self._connection.sock is None:
            self._connection.connect()
        assert self._connection.sock is not None
        self._connection.sock.settimeout(seconds)

    def _send(self, method: str, path: str, body: bytes, span: str) -> tuple[HTTPResponse, str]:
        nonce, moment, hashed = secrets.token_hex(16), f"{time.time():.3f}", digest(body)
        parts = self._recipient, method, path, span, moment, nonce, hashed
        signature = sign(self._token, *(part.encode() for part in parts))
        headers = {"X-Nonce": nonce, "X-Time": moment, "X-Body": hashed, "X-Signature": signature}
        self._connection.request(method, path, body or None, headers | ({"Range": span} if span else {}))
        return self._connection.getresponse(), nonce

    def _unreachable(self, error: Exception) -> PeerUnreachable:
        self.close()
        return PeerUnreachable(f"{self.address} cannot be reached: {error or type(error).__name__}")


def call(address: str, token: bytes, message: dict, timeout_seconds: float) -> dict:
    """Sends a small JSON object to a peer; returns its reply. Raises PeerUnreachable or Refused."""
    return post(address, token, "/message", message, timeout_seconds)


def post(address: str, token: bytes, path: str, message: dict, timeout_seconds: float) -> dict:
    """Sends JSON to a path of a peer's server. Raises PeerUnreachable or Refused."""
    peer = Peer(address, token, timeout_seconds)
    try:
        return peer.request("POST", path, canonical(message))
    finally:
        peer.close()


def ask_status(address: str, token: bytes, timeout_seconds: float) -> dict:
    """What a peer's `status` returns. Raises PeerUnreachable or Refused."""
    peer = Peer(address, token, timeout_seconds)
    try:
        return peer.request("GET", "/status")
    finally:
        peer.close()
