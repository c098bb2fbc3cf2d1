"""`metrics.jsonl`: one JSON object a line."""

import json
import os
from pathlib import Path

from gregale.services.tracking.tracker import Values, finite


class JsonlTracker:
    """Appends one object a call, in one write, so that a killed process leaves at most its last line torn.

    NaN and infinities are written as null: JSON has no such numbers.
    """

    def __init__(self, path: Path, resumed_from: int = 0):
        """
        Args:
            path: the file, made if absent.
            resumed_from: lines of later steps are dropped, and so are torn ones: a killed process wrote them, and the
                steps are about to be repeated.
        """
        if path.exists():
            _drop_lines_after(path, resumed_from)
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, values: Values) -> None:
        """Writes `{"step": step, **values}`."""
        entry = {"step": step} | dict.fromkeys(values) | {name: _plain(value) for name, value in finite(values).items()}
        self._file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _plain(value: float | int) -> float | int:
    """The number as Python's own, whether it was NumPy's or JAX's."""
    return value if isinstance(value, int) else float(value)


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrites the file without the later and the torn lines, under a temporary name first."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_of_history(line, step)]
    if kept == lines:
        return
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _is_of_history(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError):
        return False
