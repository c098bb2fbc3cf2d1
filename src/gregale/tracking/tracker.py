"""The interface of a tracker, the tracker for `metrics.jsonl`, and a tracker that combines several."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gregale.storage import ObjectPath, StoragePath
from gregale.storage.jsonl_writer import ResumePoint, lines_at

Values = Mapping[str, float | int | None]
"""Metrics by name; None (or NaN or an infinity) if there is no number."""


def finite(values: Values) -> dict[str, float | int]:
    """Return the metrics whose values are finite numbers."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class RunInfo:
    """The run as trackers see it.

    - `config`: the resolved configuration in its JSON form
    - `resumed_from`: the step from which the run resumes, 0 for a new run; trackers remove metrics of later steps if
      they can
    """

    directory: StoragePath
    name: str
    config: Mapping[str, Any]
    resumed_from: int = 0

    @property
    def files(self) -> Path:
        """The folder for files of trackers: the run directory, or `trackers/NAME` here for a run in a store."""
        if not isinstance(self.directory, ObjectPath):
            return self.directory
        folder = Path("trackers") / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Tracker(Protocol):
    """Receives metrics step by step."""

    def log(self, step: int, values: Values) -> None:
        """Log the metrics of a step; further calls for a step may add other metrics."""
        ...

    def close(self) -> None:
        """Write buffered metrics and close."""
        ...


class JsonlTracker:
    """Writes one JSON object per call, with null for NaN and infinities, to a line of a file or an object.

    Lines of steps after `resumed_from` and damaged lines are removed. `report` is called with one line when the file
    cannot be written, and when it can be written again.
    """

    def __init__(self, path: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        self._lines = lines_at(path, ResumePoint("step", resumed_from), report)

    def log(self, step: int, values: Values) -> None:
        """Write `{"step": step, **values}`, with numbers of NumPy and JAX as Python's."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in finite(values).items()}
        self._lines.add({"step": step} | dict.fromkeys(values) | numbers)

    def flush(self) -> None:
        """Write buffered lines; raise `StoreError` if a store cannot be written."""
        self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if they cannot be written."""
        self._lines.close()


class Guarded:
    """A wrapper of a third-party tracker whose errors (a full disk, no network) never end the run."""

    def __init__(self, tracker: Tracker, report: Callable[[str], None]):
        self._tracker, self._report = tracker, report
        self._has_failed = False

    def log(self, step: int, values: Values) -> None:
        self._try(lambda: self._tracker.log(step, values))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._report(f"A tracker fails; the run continues without it: {type(error).__name__}: {error}")
            self._has_failed = True


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker], flush: Callable[[], None] = lambda: None):
        self._trackers, self._flush = tuple(trackers), flush

    def log(self, step: int, values: Values) -> None:
        """Log the metrics in every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def flush(self) -> None:
        """Write the metrics that belong to a checkpoint, before its commit; raise `UserError` after a failure."""
        self._flush()

    def close(self) -> None:
        """Close every tracker, the last first, even if one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
