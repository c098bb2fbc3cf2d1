"""The page of runs for a browser on this machine, made anew while they go on.

    with served(runs, port=0) as address:
        print(address)                # http://127.0.0.1:43211/
        wait_for_the_end()

It listens on the loopback interface alone, answers nothing but the page, and changes nothing. The page asks for itself
every few seconds and keeps what its reader has chosen, zoomed and unfolded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

from gregale.errors import UserError
from gregale.files import reason
from gregale.programs.report.page import report_page
from gregale.services.history import ROUNDS, read_history
from gregale.services.run_directory import RunDirectory
from gregale.storage import Place, Status, StoreError, status

LIVE_SECONDS = 5.0
REST = 4.0  # a page that took a second to make is not made again for four
HERE = "127.0.0.1"


@contextmanager
def served(runs: Sequence[RunDirectory], port: int = 0, live_seconds: float = LIVE_SECONDS) -> Iterator[str]:
    """Serves the page of runs meanwhile; yields its address. A port of 0 is any free one.

    Raises `UserError` if the port cannot be had.
    """
    page = LivePage(runs, live_seconds)

    class Answers(_Answers):
        def content(self) -> bytes:
            return page.now()

    try:
        server = ThreadingHTTPServer((HERE, port), Answers)
    except OSError as error:
        raise UserError(f"port {port} cannot be listened on: {reason(error)}. Port 0 is any free one.") from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True, name="page")
    thread.start()
    try:
        yield f"http://{HERE}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class LivePage:
    """The page of runs as they are: it is made when somebody asks and their files have changed."""

    def __init__(self, runs: Sequence[RunDirectory], live_seconds: float = LIVE_SECONDS):
        self._runs, self._live_seconds = tuple(runs), live_seconds
        self._lock = Lock()
        self._page = b""
        self._of: list[Status | None] | None = None
        self._not_before = 0.0

    def now(self) -> bytes:
        """The page; while a store does not answer, as it was last."""
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
        begin, found = time.monotonic(), [status(place) for run in self._runs for place in _read_places(run)]
        if found == self._of:
            return
        histories = [read_history(run) for run in self._runs]
        self._page = report_page(histories, live_seconds=self._live_seconds).encode()
        self._of = found
        now = time.monotonic()
        self._not_before = now + REST * (now - begin)


class _Answers(BaseHTTPRequestHandler):
    """Gives the page at `/` to whoever asks for it by an address of this machine."""

    def content(self) -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        # A page of another site that names this machine by a name of its own is not answered.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HERE, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            content = self.content()
        except (UserError, OSError) as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal shows the run."""


def _read_places(run: RunDirectory) -> tuple[Place, ...]:
    return (run.metrics, run.samples, run.starts, run.changes, run.config, run.path / ROUNDS)
