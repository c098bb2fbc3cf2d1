"""Where the time of a loop goes beside its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spent:
    """Counts seconds of the loop's own thread, from now on: while it waits for a batch, evaluates or saves, it hands
    no step to the devices."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = {"data_seconds": 0.0, "evaluation_seconds": 0.0, "saving_seconds": 0.0}

    @contextmanager
    def on(self, figure: str) -> Iterator[None]:
        """Counts what is inside under this name."""
        began = time.monotonic()
        yield
        self._seconds[figure] = self._seconds.get(figure, 0.0) + time.monotonic() - began

    def figures(self) -> dict[str, float]:
        """`elapsed_seconds`, and of them those on each thing."""
        return {"elapsed_seconds": time.monotonic() - self._began, **self._seconds}
