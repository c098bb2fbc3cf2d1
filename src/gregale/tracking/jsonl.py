"""`metrics.jsonl`: the figures of a run, one JSON object a line, on a disk or in an object store."""

from collections.abc import Callable

from gregale.storage import StoragePath
from gregale.storage.jsonl_writer import ResumePoint, lines_at
from gregale.tracking.tracker import Values, finite


class JsonlTracker:
    """Writes a line a call. NaN and infinities are written as null: JSON has no such numbers."""

    def __init__(self, place: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        """
        Args:
            place: the file or object, made if absent.
            resumed_from: lines of later steps are dropped, and so are torn ones.
            report: told in one line when it cannot be written, and when it can be again.
        """
        self._lines = lines_at(place, ResumePoint("step", resumed_from), report)

    def log(self, step: int, values: Values) -> None:
        """Writes `{"step": step, **values}`."""
        numbers = {name: _plain(value) for name, value in finite(values).items()}
        self._lines.add({"step": step} | dict.fromkeys(values) | numbers)

    def flush(self) -> None:
        """Writes what is held back; raises `StoreError` if a store does not take it."""
        self._lines.flush()

    def close(self) -> None:
        """Writes what is left; raises `UserError` if that cannot be written."""
        self._lines.close()


def _plain(value: float | int) -> float | int:
    """The number as Python's own, whether it was NumPy's or JAX's."""
    return value if isinstance(value, int) else float(value)
