"""`metrics.jsonl`: one JSON object a line."""

import json
from collections.abc import Callable
from pathlib import Path

from gregale.errors import UserError
from gregale.files import reason, write_bytes
from gregale.services.tracking.tracker import Values, finite


class JsonlTracker:
    """Appends one object a call, in one write, so that a killed process leaves at most its last line torn.

    NaN and infinities are written as null: JSON has no such numbers. Lines that a full disk does not take are kept and
    written, whole and in their order, as soon as it does.
    """

    def __init__(self, path: Path, resumed_from: int = 0, report: Callable[[str], None] = print):
        """
        Args:
            path: the file, made if absent.
            resumed_from: lines of later steps are dropped, and so are torn ones: a killed process wrote them, and the
                steps are about to be repeated.
            report: told in one line when the file cannot be written, and when it can be again.
        """
        if path.exists():
            _drop_lines_after(path, resumed_from)
        self._path, self._report = path, report
        self._file = path.open("ab", buffering=0)
        self._whole = self._file.tell()  # bytes of whole lines
        self._waiting: list[bytes] = []

    def log(self, step: int, values: Values) -> None:
        """Writes `{"step": step, **values}`."""
        entry = {"step": step} | dict.fromkeys(values) | {name: _plain(value) for name, value in finite(values).items()}
        waited = bool(self._waiting)
        self._waiting.append(json.dumps(entry, allow_nan=False).encode() + b"\n")
        failed = self._write()
        if failed and not waited:
            self._report(f"{self._path} cannot be written: {failed}. Its lines are kept until there is room.")
        if waited and not failed:
            self._report(f"{self._path} is written again, with the lines that were kept.")

    def close(self) -> None:
        """Closes the file.

        Raises:
            UserError: there are lines that it still does not take.
        """
        failed = self._write()
        self._file.close()
        if failed:
            raise UserError(f"{self._path} lacks its last {len(self._waiting)} lines: {failed}.")

    def _write(self) -> str | None:
        """Writes the lines that wait, all or none; returns why it failed, if it did."""
        content = b"".join(self._waiting)
        try:
            written = self._file.write(content)
            if written < len(content):  # the disk is full now; the next write says how
                self._file.write(content[written:])
                raise OSError("it was written in part")
        except OSError as error:
            self._file.truncate(self._whole)
            return reason(error)
        self._whole += len(content)
        self._waiting.clear()
        return None


def _plain(value: float | int) -> float | int:
    """The number as Python's own, whether it was NumPy's or JAX's."""
    return value if isinstance(value, int) else float(value)


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrites the file without the later and the torn lines, under a temporary name first."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_of_history(line, step)]
    if kept == lines:
        return
    write_bytes(path, b"".join(kept))


def _is_of_history(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError):
        return False
