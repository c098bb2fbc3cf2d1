"""Counts of what a run has read and sent, whatever its batches and meshes were before, and of its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig


@dataclass(frozen=True)
class DataPosition:
    """Counts examples and tokens, from where the run goes on.

    - `first_step`: steps done before
    - `examples_before`: examples that they have seen, whatever the size of their batches; the next step begins there
    """

    batch: BatchConfig
    first_step: int = 0
    examples_before: int = 0

    def examples(self, step: int) -> int:
        """Examples that the first `step` steps of the run have seen."""
        return self.examples_before + (step - self.first_step) * self.batch.size

    def tokens(self, step: int) -> int:
        """Tokens that the first `step` steps of the run have seen; a run never changes its sequence length."""
        return self.examples(step) * self.batch.sequence_length


@dataclass(frozen=True)
class Traffic:
    """Counts what a device sends over `replica`, from where the run goes on.

    - `first_step`: steps done before
    - `bytes_before`: bytes that a device had sent then, on whatever meshes and by whatever methods
    """

    setup: Setup
    first_step: int = 0
    bytes_before: int = 0

    def bytes_sent(self, step: int) -> int:
        """Bytes that a device has sent in the first `step` steps of the run."""
        return self.figures(step)["replica_bytes"]

    def figures(self, step: int) -> dict[str, int]:
        """`replica_bytes`: bytes sent so far; for DiLoCo also `steps_since_sync`: steps since the last sending."""
        figures, at_first = self.setup.traffic(step), self.setup.traffic(self.first_step)
        since = figures["replica_bytes"] - at_first["replica_bytes"]
        return {**figures, "replica_bytes": self.bytes_before + since}


class PhaseTimer:
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
