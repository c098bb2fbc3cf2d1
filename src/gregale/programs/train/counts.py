"""Provides counts of a run's examples, bytes sent and seconds, across changes of batch size and mesh."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig


@dataclass(frozen=True)
class DataPosition:
    """Counts examples and tokens from the step at which the run resumes.

    - `first_step`: steps before the resumption
    - `examples_before`: examples of those steps; the next step begins at this example
    """

    batch: BatchConfig
    first_step: int = 0
    examples_before: int = 0

    def examples(self, step: int) -> int:
        """Return the number of examples in the first `step` steps of the run."""
        return self.examples_before + (step - self.first_step) * self.batch.size

    def tokens(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps of the run, which never changes its sequence length."""
        return self.examples(step) * self.batch.sequence_length


@dataclass(frozen=True)
class Traffic:
    """Counts the bytes that a device sends over `replica` from the step at which the run resumes.

    - `first_step`: steps before the resumption
    - `bytes_before`: bytes that a device sent in those steps, on all meshes and by all methods
    """

    setup: Setup
    first_step: int = 0
    bytes_before: int = 0

    def bytes_sent(self, step: int) -> int:
        """Return the bytes that a device has sent in the first `step` steps of the run."""
        return self.figures(step)["replica_bytes"]

    def figures(self, step: int) -> dict[str, int]:
        """Return `replica_bytes`: bytes sent so far; for DiLoCo also `steps_since_sync`: steps since the last sync."""
        figures, at_first = self.setup.traffic(step), self.setup.traffic(self.first_step)
        since = figures["replica_bytes"] - at_first["replica_bytes"]
        return {**figures, "replica_bytes": self.bytes_before + since}


class PhaseTimer:
    """Counts the seconds in which the loop's thread starts no step: waits for batches, evaluations, saves."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = {"data_seconds": 0.0, "evaluation_seconds": 0.0, "saving_seconds": 0.0}

    @contextmanager
    def on(self, figure: str) -> Iterator[None]:
        """Count the seconds of the `with` block under this name."""
        began = time.monotonic()
        yield
        self._seconds[figure] = self._seconds.get(figure, 0.0) + time.monotonic() - began

    def figures(self) -> dict[str, float]:
        """Return `elapsed_seconds`, and the seconds of each phase."""
        return {"elapsed_seconds": time.monotonic() - self._began, **self._seconds}
