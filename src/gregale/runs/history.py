"""Readers of a run's files (metrics, samples, configuration, starts, rounds), also while the run writes them.

The content of the files raises no error; only a failing disk or store does. This module does not import JAX.
"""

import math
import os
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gregale.errors import UserError
from gregale.runs.parsing import read_yaml
from gregale.runs.run_lock import is_being_trained
from gregale.runs.run_paths import RunPaths
from gregale.storage import ObjectPath, StoragePath, status
from gregale.storage.jsonl import Entry, damage, entry_of, read_entries

ROUNDS = "rounds.jsonl"
LARGEST = 2.0**1000  # metrics must be smaller
_SAMPLE = re.compile(r"^--- step (\d{1,15})$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Column:
    """One metric of a run."""

    steps: np.ndarray  # [point] int64, ascending
    values: np.ndarray  # [point] float64; NaN if the run wrote null

    def at(self, step: int) -> float | None:
        """Return the value of a step; None if it has no number."""
        found = self.values[self.steps == step]
        return float(found[-1]) if len(found) and np.isfinite(found[-1]) else None


@dataclass(frozen=True)
class Figures(Mapping[str, Column]):
    """The metrics of a run by name, in the order of their first occurrence."""

    columns: Mapping[str, Column]
    lines: int = 0  # number of complete lines of the file
    problems: tuple[str, ...] = ()  # sentences about damage of the file

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def last_step(self) -> int:
        """The last step that has a metric; 0 before the first."""
        return max((int(column.steps[-1]) for column in self.columns.values()), default=0)


@dataclass(frozen=True)
class Sample:
    """The model's samples after a step, one text for each prompt."""

    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class History:
    """The content of a run directory."""

    name: str
    path: str
    config: Mapping[str, Any]  # by dotted keys (`model.layers`); empty if it cannot be read
    figures: Figures
    samples: tuple[Sample, ...]
    starts: tuple[Entry, ...]  # the entries of starts.jsonl
    changes: tuple[Entry, ...]  # of changes.jsonl
    rounds: tuple[Entry, ...]  # of rounds.jsonl, if a network joins the run with others
    is_running: bool  # whether a process trains the run now
    problems: tuple[str, ...]  # sentences about damaged or absent files
    stop_reason: str | None = None  # of the callback that ended the run


def read_history(run: RunPaths) -> History:
    """Read all files of a run; raise `UserError` if there is no run."""
    if not run.config.is_file() and not run.metrics.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.yaml. `gregale train` makes one.")
    is_running = is_being_trained(run.path)
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = flat(read_yaml(run.config)[0])
    except UserError as error:
        problems.append(str(error))
    metrics = FiguresReader(run.metrics).read()
    entries = [read_entries(path) for path in (run.starts, run.changes, run.path / ROUNDS)]
    problems += [*metrics.problems, *(problem for _, problem in entries if problem)]
    samples = samples_in(_content(run.samples).decode(errors="replace"))
    starts, changes, rounds = (found for found, _ in entries)
    name, path = run.path.absolute().name, str(run.path)
    reason = None if is_running else run.stop_reason(run.recorded_checkpoint())
    return History(name, path, config, metrics, samples, starts, changes, rounds, is_running, tuple(problems), reason)


class FiguresReader:
    """Reads metrics.jsonl repeatedly while it grows, and parses only new lines.

    It ignores a last line without a line break, which is being written. It skips and reports damaged lines. A replaced
    file (a resumed run removes lines) is read from the start.
    """

    def __init__(self, path: StoragePath):
        self._path = path
        self._identity: object = None  # identifies the file or object that was read
        self._reset()

    def _reset(self) -> None:
        self._columns: dict[str, tuple[array, array]] = {}
        self._read = 0  # bytes of complete lines
        self._lines = self._damaged = self._first_damaged = 0

    def read(self) -> Figures:
        """Return all metrics so far; none if there is no file yet."""
        content = self._new_content()
        *lines, rest = content.split(b"\n")
        self._read += len(content) - len(rest)
        for line in lines:
            self._lines += 1
            if not self._parse(line):
                self._damaged += 1
                self._first_damaged = self._first_damaged or self._lines
        columns, repeated = {}, 0
        for name, (steps, values) in self._columns.items():
            column = Column(np.array(steps, np.int64), np.array(values, np.float64))
            columns[name], backwards = _ascending(column)
            repeated = max(repeated, backwards)
        return Figures(columns, self._lines, self._problems(repeated))

    def _new_content(self) -> bytes:
        """Return the bytes that were not read yet."""
        if isinstance(self._path, ObjectPath):
            found = status(self._path)  # a store cannot append, so a changed object is read as a whole
            if found == self._identity:
                return b""
            self._identity = found
            self._reset()
            return _content(self._path)
        try:
            with open(self._path, "rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._identity or now.st_size < self._read:
                    self._identity = now.st_ino
                    self._reset()
                file.seek(self._read)
                return file.read()
        except FileNotFoundError:
            self._reset()
            return b""

    def _parse(self, line: bytes) -> bool:
        """Add the metrics of a line to the columns; return whether the whole line is valid."""
        if (entry := entry_of(line, "step")) is None:
            return False
        step = entry["step"]
        is_valid = True
        for name, value in entry.items():
            kind = type(value)
            if name == "step":
                continue
            if kind in (int, float) and abs(value) < LARGEST:
                number = float(value)
            elif kind is float or value is None:  # NaN or infinite
                number = math.nan
            else:
                is_valid = False
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(number)
        return is_valid

    def _problems(self, repeated: int) -> tuple[str, ...]:
        problems = []
        if self._damaged:
            problems.append(damage(self._path, self._damaged, self._lines, self._first_damaged))
        if repeated:
            problems.append(
                f"{self._path}: the steps do not ascend, {repeated:,} come after a later one; of two lines for a step "
                "the last one counts. Two processes may have written it."
            )
        return tuple(problems)


def samples_in(text: str) -> tuple[Sample, ...]:
    """Parse the samples of a samples.txt, by step in the order of the file."""
    found: dict[int, list[str]] = {}
    headings = [*_SAMPLE.finditer(text)]
    ends = [*(each.start() for each in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=False):
        found.setdefault(int(heading[1]), []).append(text[heading.end() : end].strip("\n"))
    return tuple(Sample(step, tuple(texts)) for step, texts in found.items())


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a tree of mappings to dotted keys; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def spikes_kept(values: np.ndarray, bins: int) -> np.ndarray:
    """Select the points of a long line to draw: the smallest, the largest and the first non-finite value of each bin.

    - `values`: [point]
    - `bins`: number of bins, which have equal numbers of points

    Returns ascending indices: at most 3 per bin, the first and the last point; all points if there are few.
    """
    count = len(values)
    if count <= 2 * bins:
        return np.arange(count)
    size = -(-count // bins)
    starts = np.arange(0, count, size)
    padded = np.full(len(starts) * size, np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    rows = padded.reshape(-1, size)  # [bin, point]
    missing = np.isnan(rows)
    known, none = ~missing.all(axis=1), ~np.isfinite(values)
    smallest = starts + np.where(missing, np.inf, rows).argmin(axis=1)
    largest = starts + np.where(missing, -np.inf, rows).argmax(axis=1)
    gaps = np.unique(np.flatnonzero(none) // size, return_index=True)[1]
    return np.unique(np.concatenate([smallest[known], largest[known], np.flatnonzero(none)[gaps], [0, count - 1]]))


def _ascending(column: Column) -> tuple[Column, int]:
    """Return the column sorted by step, with the last value of each step, and the number of descending steps."""
    steps, values = column.steps, column.values
    ahead = np.diff(steps)
    if (ahead > 0).all():
        return column, 0
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(np.diff(steps) > 0, True)
    return Column(steps[last], values[last]), int((ahead < 0).sum())


def _content(path: StoragePath) -> bytes:
    """Return the bytes of a file or an object; no bytes if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
