"""Work in threads of which only the newest counts, so that a slow recipient cannot fill a queue."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any


class LatestWork(ThreadPoolExecutor):
    """Threads for work by key: one piece at a time for each key, and the newest replaces a piece that waits."""

    def __init__(self, threads: int, name: str):
        super().__init__(threads, name)
        self._guard = Lock()
        self._latest: dict[str, Any] = {}  # the work that waits, by each key that has work; None: the only one runs

    def put(self, key: str, work: Callable[[], object]) -> None:
        with self._guard:
            is_new, self._latest[key] = key not in self._latest, work
            if is_new:
                self.submit(self._run, key)

    def _run(self, key: str) -> None:
        with self._guard:
            work, self._latest[key] = self._latest[key], None
        try:
            work()
        finally:
            with self._guard, suppress(RuntimeError):  # after `shutdown`
                if self._latest[key] is None:
                    del self._latest[key]
                else:
                    self.submit(self._run, key)  # behind the work of other keys
