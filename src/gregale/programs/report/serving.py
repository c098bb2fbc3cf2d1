"""Provides the page of running runs, rebuilt after changes; it reloads itself and keeps the reader's selections."""

import time
from collections.abc import Sequence
from threading import Lock

from gregale.programs.report.page import report_page
from gregale.runs.history import ROUNDS, read_history
from gregale.runs.run_lock import is_being_trained
from gregale.runs.run_paths import RunPaths
from gregale.storage import StoreError, status

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
