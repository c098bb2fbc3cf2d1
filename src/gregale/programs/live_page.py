"""Provides a page over HTTP to this machine; other machines need a secret path, and other web pages get no content.

Another site can direct a reader's browser here by a host name that resolves to this machine (DNS rebinding). On
loopback the server therefore accepts only loopback host names. On any other address the page has a secret path. A
browser that has the current page gets a short "not modified" answer.
"""

import hmac
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from socketserver import TCPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from gregale.errors import UserError
from gregale.programs.report import report_page
from gregale.runs.history import RunPaths, read_history
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

LIVE_SECONDS = 5.0
REST = 4.0  # seconds without a rebuild for each second of the last rebuild


class LivePage:
    """Current page of runs; a request rebuilds it if the runs' files have changed."""

    def __init__(self, runs: Sequence[RunPaths], live_seconds: float = LIVE_SECONDS):
        self._runs, self._live_seconds = tuple(runs), live_seconds
        self._lock, self._not_before = Lock(), 0.0
        self._page, self._of = b"", None  # the page, and the version of the files that it shows

    def now(self) -> bytes:
        """Return the page; while an object store does not answer, the last one."""
        with self._lock:
            begin = time.monotonic()
            try:
                if begin >= self._not_before and (found := [*map(_version, self._runs)]) != self._of:
                    histories = [read_history(run) for run in self._runs]
                    self._page = report_page(histories, live_seconds=self._live_seconds).encode()
                    self._of, now = found, time.monotonic()
                    self._not_before = now + REST * (now - begin)
            except StoreError:
                if not self._page:
                    raise
            return self._page


def _version(run: RunPaths) -> tuple[object, ...]:
    """Return a value that changes when the page changes."""
    paths = (run.metrics, run.samples, run.starts, run.changes, run.config, run.rounds)
    return (*map(status, paths), is_being_trained(run.path))


@contextmanager
def served(content: Content, host: str, port: int) -> Iterator[str]:
    """Serve a page meanwhile; yield its address.

    - `host`: the address to listen on
    - `port`: 0: any free port

    Raises `UserError` if nothing can listen there.
    """
    path = "/" if is_loopback(host) else f"/{token_urlsafe(16)}/"
    try:
        server = _Server(content, path, (host, port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"address {host}, port {port}: nothing can listen there: {why}. Give another one.") from None
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="web").start()
    with server:
        try:
            yield f"http://{f'[{name}]' if ':' in name else name}:{server.server_address[1]}{path}"
        finally:
            server.shutdown()


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(ThreadingHTTPServer):
    def __init__(self, content: Content, path: str, address: tuple[str, int]):
        self.content, self.path = content, path
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's DNS query for this machine's name, which can be slow."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects during an answer is no failure."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 60  # seconds without data on a connection; each connection ends after its answer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.encode("utf-8", "surrogateescape")
        if self.server.path == "/" and not _names_loopback(self.headers.get("Host", "")):
            return self.send_error(HTTPStatus.FORBIDDEN, explain="Only for the names of this machine, as 127.0.0.1.")
        if not hmac.compare_digest(path, self.server.path.encode()):
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            content = self.server.content()
        except (UserError, OSError) as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        tag = f'"{digest(content)}"'
        if self.headers.get("If-None-Match") == tag:
            content = b""
        self.send_response(HTTPStatus.OK if content else HTTPStatus.NOT_MODIFIED)
        self.send_header("ETag", tag)
        if content:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _names_loopback(host: str) -> bool:
    """Return whether a request's Host is a loopback name, with any port, because a tunnel may use another port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
