"""Work in threads of which only the newest counts, so that a slow recipient cannot fill a queue."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock


class LatestWork:
    """Work by key: one piece at a time for each key, and the newest replaces a piece that waits."""

    def __init__(self, threads: int, name: str):
        self._threads, self._lock = ThreadPoolExecutor(threads, name), Lock()
        self._waiting: dict[str, Callable[[], object] | None] = {}  # by each key that has work; None: it runs
        self._closed = False

    def submit(self, key: str, work: Callable[[], object]) -> None:
        with self._lock:
            is_new, self._waiting[key] = key not in self._waiting, work
            if is_new and not self._closed:
                self._threads.submit(self._run, key)

    def _run(self, key: str) -> None:
        with self._lock:
            work, self._waiting[key] = self._waiting[key], None
        try:
            assert work is not None
            work()
        finally:
            with self._lock:
                if self._waiting[key] is None:
                    del self._waiting[key]
                elif not self._closed:
                    self._threads.submit(self._run, key)  # behind the work of other keys

    def close(self) -> None:
        """Drop the work that waits; the work in progress ends by itself."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
