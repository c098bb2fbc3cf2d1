"""The tracker for `metrics.jsonl`: a run's metrics as one JSON object per line, on a disk or in an object store."""

from collections.abc import Callable

from gregale.storage import StoragePath
from gregale.storage.jsonl_writer import ResumePoint, lines_at
from gregale.tracking.tracker import Values, finite


class JsonlTracker:
    """Writes one line per call, with null for NaN and infinities, which JSON does not have."""

    def __init__(self, path: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        """
        Args:
            path: the file or object, created if absent.
            resumed_from: lines of later steps and damaged lines are removed.
            report: called with one line when the file cannot be written, and when it can be written again.
        """
        self._lines = lines_at(path, ResumePoint("step", resumed_from), report)

    def log(self, step: int, values: Values) -> None:
        """Write `{"step": step, **values}`."""
        numbers = {name: _plain(value) for name, value in finite(values).items()}
        self._lines.add({"step": step} | dict.fromkeys(values) | numbers)

    def flush(self) -> None:
        """Write buffered lines; raise `StoreError` if a store cannot be written."""
        self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if they cannot be written."""
        self._lines.close()


def _plain(value: float | int) -> float | int:
    """Convert a number of NumPy or JAX to a Python number."""
    return value if isinstance(value, int) else float(value)
