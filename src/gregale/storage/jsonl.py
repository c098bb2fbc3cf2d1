"""Files and objects of JSON lines: they are read whole or as they grow, and written line by line.

All readers of `metrics.jsonl`, `rounds.jsonl`, `starts.jsonl` and `changes.jsonl` validate lines with `entry_of`.

Opening a file at a `ResumePoint` removes the lines of later steps.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from gregale.atomic_files import os_error_text, write_bytes
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, StoreError

Entry = Mapping[str, Any]
HIGHEST_STEP = 2**53


class Entries(NamedTuple):
    """The valid entries of a file, in its order, and a sentence about its damaged lines."""

    entries: tuple[Entry, ...]
    problem: str | None


def entry_of(line: bytes, number: str | None = None) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is not valid.

    - `number`: a key whose value must be an integer of at least 0
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8 also raise a ValueError
        return None
    if not isinstance(entry, dict):
        return None
    if number is None:
        return entry
    value = entry.get(number)
    return entry if type(value) is int and 0 <= value < HIGHEST_STEP else None


def read_entries(path: StoragePath, number: str | None = None) -> Entries:
    """Read the entries of a file or an object; return no entries if it does not exist.

    A last line without a line break is ignored: it is being written, or the writing process was killed.

    - `number`: as in `entry_of`
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return Entries((), None)
    found = [entry_of(line, number) for line in lines]
    return Entries(tuple(entry for entry in found if entry is not None), problem_of(path, found))


def problem_of(path: StoragePath, found: Sequence[Entry | None]) -> str | None:
    """Return a sentence about the damaged lines; None if all lines are valid.

    - `found`: the entry of each complete line, or None
    """
    damaged = [number for number, entry in enumerate(found, 1) if entry is None]
    return damage(path, len(damaged), len(found), damaged[0]) if damaged else None


def damage(path: StoragePath, damaged: int, lines: int, first: int) -> str:
    """Return the sentence about damaged lines; `first` is the number of the first of them."""
    return f"{path}: {damaged:,} of {lines:,} lines are damaged, the first is line {first:,}; they are left out."


FLUSH_SECONDS = 30.0
_MAX_BYTES_PER_SECOND = 100_000  # average upload rate for the lines of a run in a store


class ResumePoint(NamedTuple):
    """The position from which a run resumes: valid lines whose number under `key` is at most `last` stay.

    A killed process wrote the other lines, and the resumed run repeats their steps.
    """

    key: str
    last: int

    def of(self, content: bytes, path: StoragePath, report: Callable[[str], None]) -> list[bytes]:
        """Return the lines that stay; call `report` once if there are damaged lines, which are removed."""
        lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
        found = [entry_of(line, self.key) for line in lines]
        if (problem := problem_of(path, found)) is not None:
            report(problem)
        entries = zip(lines, found, strict=True)
        return [line for line, entry in entries if entry is not None and entry[self.key] <= self.last]


def lines_at(
    path: StoragePath, resume_point: ResumePoint, report: Callable[[str], None]
) -> "FileJsonlWriter | ObjectJsonlWriter":
    """Open the writer for a path; the arguments are those of the two classes."""
    if isinstance(path, ObjectPath):
        return ObjectJsonlWriter(path, resume_point, report)
    return FileJsonlWriter(path, resume_point, report)


class FileJsonlWriter:
    """Appends one object a call, in one write, so that a killed process leaves at most its last line incomplete.

    If the disk is full, the lines stay in memory and are written in order as soon as there is room.
    """

    def __init__(self, path: Path, resume_point: ResumePoint, report: Callable[[str], None]):
        """Open the file, or create it; `report` receives a line about damage, a failed write, and its end."""
        if path.exists():
            before = path.read_bytes()
            if (kept := b"".join(resume_point.of(before, path, report))) != before:
                write_bytes(path, kept)
        self._path, self._report = path, report
        self._file = path.open("ab", buffering=0)
        self._complete = self._file.tell()  # bytes of complete lines
        self._waiting: list[bytes] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """Write an object as a line."""
        waited = bool(self._waiting)
        self._waiting.append(_line(entry))
        failed = self._write()
        if failed and not waited:
            self._report(f"{self._path} cannot be written: {failed}. Its lines are kept until there is room.")
        if waited and not failed:
            self._report(f"{self._path} is written again, with the lines that were kept.")

    def flush(self) -> None:
        """Do nothing: `add` writes each line at once."""

    def close(self) -> None:
        """Close the file; raise `UserError` if some lines could not be written."""
        failed = self._write()
        self._file.close()
        if failed:
            raise UserError(f"{self._path} lacks its last {len(self._waiting)} lines: {failed}.")

    def _write(self) -> str | None:
        """Write all waiting lines or none; return the error text after a failure."""
        content = b"".join(self._waiting)
        try:
            written = self._file.write(content)
            if written < len(content):  # the disk is full now; the next write raises the error
                self._file.write(content[written:])
                raise OSError("it was written in part")
        except OSError as error:
            self._file.truncate(self._complete)
            return os_error_text(error)
        self._complete += len(content)
        self._waiting.clear()
        return None


class ObjectJsonlWriter:
    """Keeps all lines and rewrites the object in a background thread, because a store cannot append.

    It writes every 30 seconds, less often for a large object, and before a checkpoint becomes valid. So a killed
    process leaves complete lines, and all lines up to the newest checkpoint.
    """

    def __init__(self, path: ObjectPath, resume_point: ResumePoint, report: Callable[[str], None]):
        """Take the arguments of `FileJsonlWriter`. Raises `StoreError` if the existing lines cannot be read."""
        self._path, self._report = path, report
        try:
            before = path.read_bytes()
        except FileNotFoundError:
            before = b""
        kept = resume_point.of(before, path, report)
        self._size = sum(map(len, kept))
        self._lines, self._written = kept, len(kept) if self._size == len(before) else -1
        self._adding, self._writing = Lock(), Lock()
        self._ended = Event()
        self._thread = Thread(target=self._write_periodically, daemon=True, name="lines")
        self._thread.start()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an object as a line; any thread may call this."""
        line = _line(entry)
        with self._adding:
            self._lines.append(line)
            self._size += len(line)

    def flush(self) -> None:
        """Write the object if it lacks lines; raise `StoreError` if it cannot be written."""
        with self._writing:
            with self._adding:
                count = len(self._lines)
            if count != self._written:
                self._path.write_bytes(b"".join(self._lines[:count]))
                self._written = count

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if the store cannot be written."""
        self._ended.set()
        self._thread.join()
        try:
            self.flush()
        except StoreError as error:
            raise UserError(
                f"{self._path} lacks its last {len(self._lines) - max(self._written, 0)} lines. {error}"
            ) from error

    def _write_periodically(self) -> None:
        has_failed = False
        while not self._ended.wait(max(FLUSH_SECONDS, self._size / _MAX_BYTES_PER_SECOND)):
            try:
                self.flush()
            except StoreError as error:
                if not has_failed:
                    self._report(f"{error.fact} Its lines are kept until it can be written.")
                has_failed = True
            else:
                if has_failed:
                    self._report(f"{self._path} is written again, with the lines that were kept.")
                has_failed = False


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"
