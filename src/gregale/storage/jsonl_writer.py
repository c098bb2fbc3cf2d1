"""Lines of JSON, `metrics.jsonl` and `rounds.jsonl`: in a file that is appended to, or in an object written anew.

    lines = lines_at(run / "metrics.jsonl", History("step", 100), print)
    lines.add({"step": 101, "loss": 2.0})
    lines.flush()  # before a checkpoint counts
    lines.close()

What was written of later steps than 100 goes when it is opened so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from gregale.atomic_files import os_error_text, write_bytes
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, StoreError
from gregale.storage.jsonl_reader import entry_of, problem_of

FLUSH_SECONDS = 30.0
_MOST_BYTES_PER_SECOND = 100_000  # over a long time, that the lines of a run in a store may take of its connection


class ResumePoint(NamedTuple):
    """Which lines stay when they are gone on with: those whose number under `key` is at most `last`, and whole.

    The others were written by a killed process, and what they tell of is about to be repeated.
    """

    key: str
    last: int

    def of(self, content: bytes, place: StoragePath, report: Callable[[str], None]) -> list[bytes]:
        """Return the lines of a file that stay; `report` is told once of damaged ones, which go."""
        lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
        found = [entry_of(line, self.key) for line in lines]
        if (problem := problem_of(place, found)) is not None:
            report(problem)
        entries = zip(lines, found, strict=True)
        return [line for line, entry in entries if entry is not None and entry[self.key] <= self.last]


def lines_at(
    place: StoragePath, history: ResumePoint, report: Callable[[str], None]
) -> FileJsonlWriter | ObjectJsonlWriter:
    """The lines of a place; arguments as those of the two classes."""
    if isinstance(place, ObjectPath):
        return ObjectJsonlWriter(place, history, report)
    return FileJsonlWriter(place, history, report)


class FileJsonlWriter:
    """Appends one object a call, in one write, so that a killed process leaves at most its last line torn.

    Lines that a full disk does not take are kept and written, whole and in their order, as soon as it does.
    """

    def __init__(self, path: Path, history: ResumePoint, report: Callable[[str], None]):
        """
        Args:
            path: the file, made if absent.
            history: which of its lines stay.
            report: told in one line of damaged lines, when the file cannot be written, and when it can be again.
        """
        if path.exists():
            before = path.read_bytes()
            if (kept := b"".join(history.of(before, path, report))) != before:
                write_bytes(path, kept)
        self._path, self._report = path, report
        self._file = path.open("ab", buffering=0)
        self._whole = self._file.tell()  # bytes of whole lines
        self._waiting: list[bytes] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """Writes an object as a line."""
        waited = bool(self._waiting)
        self._waiting.append(_line(entry))
        failed = self._write()
        if failed and not waited:
            self._report(f"{self._path} cannot be written: {failed}. Its lines are kept until there is room.")
        if waited and not failed:
            self._report(f"{self._path} is written again, with the lines that were kept.")

    def flush(self) -> None:
        """Nothing: lines are written as they come."""

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
            return os_error_text(error)
        self._whole += len(content)
        self._waiting.clear()
        return None


class ObjectJsonlWriter:
    """Keeps all lines, and writes the object anew in the background, for a store appends nothing.

    That happens every 30 seconds, more rarely when the object is large, and before a checkpoint counts: a killed
    process leaves whole lines, and all of those that the newest checkpoint has behind it.
    """

    def __init__(self, place: ObjectPath, history: ResumePoint, report: Callable[[str], None]):
        """As `FileJsonlWriter`. Raises `StoreError` if the store does not give the lines that there are."""
        self._place, self._report = place, report
        try:
            before = place.read_bytes()
        except FileNotFoundError:
            before = b""
        kept = history.of(before, place, report)
        self._size = sum(map(len, kept))
        self._lines, self._written = kept, len(kept) if self._size == len(before) else -1
        self._adding, self._writing = Lock(), Lock()
        self._ended = Event()
        self._thread = Thread(target=self._write_at_times, daemon=True, name="lines")
        self._thread.start()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Takes an object as a line; any thread may."""
        line = _line(entry)
        with self._adding:
            self._lines.append(line)
            self._size += len(line)

    def flush(self) -> None:
        """Writes the object if there are other lines than it has; raises `StoreError` if it cannot be written."""
        with self._writing:
            with self._adding:
                count = len(self._lines)
            if count != self._written:
                self._place.write_bytes(b"".join(self._lines[:count]))
                self._written = count

    def close(self) -> None:
        """Writes what is left.

        Raises:
            UserError: the store does not take it.
        """
        self._ended.set()
        self._thread.join()
        try:
            self.flush()
        except StoreError as error:
            raise UserError(
                f"{self._place} lacks its last {len(self._lines) - max(self._written, 0)} lines. {error}"
            ) from error

    def _write_at_times(self) -> None:
        has_failed = False
        while not self._ended.wait(max(FLUSH_SECONDS, self._size / _MOST_BYTES_PER_SECOND)):
            try:
                self.flush()
            except StoreError as error:
                if not has_failed:
                    self._report(f"{error.fact} Its lines are kept until it can be written.")
                has_failed = True
            else:
                if has_failed:
                    self._report(f"{self._place} is written again, with the lines that were kept.")
                has_failed = False


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"
