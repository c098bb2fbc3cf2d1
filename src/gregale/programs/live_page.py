"""Provides a page over HTTP to this machine; other machines need a secret path, and other web pages get no content.

Another site can direct a reader's browser here by a host name that resolves to this machine (DNS rebinding). On
loopback the server therefore accepts only loopback host names. On any other address the page has a secret path. A
browser that has the current page gets a short "not modified" answer.
"""

import hmac
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from socketserver import TCPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from gregale.errors import UserError
from gregale.programs.report import report_page
from gregale.runs.history import ROUNDS, RunPaths, read_history
from gregale.runs.run_lock import is_being_trained
from gregale.storage import StoreError, digest, status

Content = Callable[[], bytes]
"""Function that returns the current page; several threads call it."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TEXT = {"Content-Type": "text/plain; charset=utf-8"}


LIVE_SECONDS = 5.0
REST = 4.0  # seconds without a rebuild for each second of the last rebuild


class LivePage:
    """Current page of runs; a request rebuilds it if the runs' files have changed."""

    def __init__(self, runs: Sequence[RunPaths], live_seconds: float = LIVE_SECONDS):
        self._runs, self._live_seconds = tuple(runs), live_seconds
        self._lock = Lock()
        self._page = b""
        self._of: list[tuple[object, ...]] | None = None
        self._not_before = 0.0

    def now(self) -> bytes:
        """Return the page; while an object store does not answer, the last one."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return self._page
            try:
                self._make()
            except StoreError:
                if not self._page:
                    raise
            return self._page

    def _make(self) -> None:
        begin, found = time.monotonic(), [_version(run) for run in self._runs]
        if found == self._of:
            return
        histories = [read_history(run) for run in self._runs]
        self._page = report_page(histories, live_seconds=self._live_seconds).encode()
        self._of = found
        now = time.monotonic()
        self._not_before = now + REST * (now - begin)


def _version(run: RunPaths) -> tuple[object, ...]:
    """Return a value that changes when the page changes."""
    paths = (run.metrics, run.samples, run.starts, run.changes, run.config, run.path / ROUNDS)
    return (*map(status, paths), is_being_trained(run.path))


class Server:
    def __init__(self, content: Content, host: str, port: int):
        """
        - `host`: the address to listen on
        - `port`: 0: any free port

        Raises `UserError` if the server cannot listen there.
        """
        self.is_local = is_loopback(host)
        self._prefix = "/" if self.is_local else f"/{token_urlsafe(16)}/"
        try:
            self._server = _Listening(content, self._prefix, self.is_local, (host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"address {host}, port {port}: nothing can listen there: {why}. Give another one."
            ) from None
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="web")

    @property
    def address(self) -> str:
        address, port = self._server.server_address[:2]
        host = socket.gethostname() if address in ("0.0.0.0", "::") else str(address)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}{self._prefix}"

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Listening(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, content: Content, prefix: str, is_local: bool, address: tuple[str, int]):
        self.content, self.prefix, self.is_local = content, prefix, is_local
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's DNS query for this machine's name, which can be slow."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects during an answer is no failure."""


class _Handler(BaseHTTPRequestHandler):
    server: _Listening
    timeout = 60  # seconds without data on a connection; each connection ends after its answer

    def do_GET(self) -> None:
        if self.server.is_local and not _names_loopback(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"This page is for the names of this machine only, such as 127.0.0.1.")
            return
        path = urlsplit(self.path).path.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(path, self.server.prefix.encode()):
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing here.")
            return
        try:
            content = self.server.content()
        except (UserError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())
            return
        tag = f'"{digest(content)}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
        else:
            self._answer(HTTPStatus.OK, content, {"ETag": tag, "Content-Type": "text/html; charset=utf-8"})

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str] = TEXT) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _names_loopback(host: str) -> bool:
    """Return whether a request's Host is a loopback name, with any port, because a tunnel may use another port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
