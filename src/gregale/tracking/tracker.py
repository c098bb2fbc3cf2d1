"""The callback that writes `metrics.jsonl`, and a wrapper of callbacks whose errors never end the run."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from gregale.errors import told
from gregale.storage import StoragePath
from gregale.storage.jsonl_writer import ResumePoint, lines_at
from gregale.tracking.callback import Callback, Metrics, RunInfo, finite


class Tracker(Callback, ABC):
    """A callback that logs the metrics of steps and evaluations in the same way."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; further calls for a step may add other metrics."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)


class JsonlTracker(Tracker):
    """Writes one JSON object per call, with null for NaN and infinities, to a line of a file or an object.

    Lines of steps after `resumed_from` and damaged lines are removed. `report` is called with one line when the file
    cannot be written, and when it can be written again.
    """

    def __init__(self, path: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        self._lines = lines_at(path, ResumePoint("step", resumed_from), report)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write `{"step": step, **metrics}`, with numbers of NumPy and JAX as Python's."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in finite(metrics).items()}
        self._lines.add({"step": step} | dict.fromkeys(metrics) | numbers)

    def flush(self) -> None:
        """Write buffered lines; raise `StoreError` if a store cannot be written."""
        self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if they cannot be written."""
        self._lines.close()


class Guarded(Callback):
    """A wrapper of a third-party tracker whose errors (a full disk, no network) never end the run."""

    def __init__(self, tracker: Callback, name: str, report: Callable[[str], None]):
        self._tracker, self._name, self._report = tracker, name, report
        self._has_failed = False

    def on_start(self, run: RunInfo) -> None:
        self._try(lambda: self._tracker.on_start(run))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_step(step, metrics))

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_evaluation(step, metrics))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._report(f"The tracker {self._name} fails; the run continues without it: {told(error)}")
            self._has_failed = True
