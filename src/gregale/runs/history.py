"""What a run has written, read also while it is being written: figures, samples, configuration, starts, rounds.

    history = read_history(RunPlaces(Path("runs/quickstart")))
    loss = history.figures["loss"]            # Column(steps, values); NaN where there was no number
    history.problems                          # what is damaged or absent, in sentences

    reader = FiguresReader(run.metrics)       # for whoever looks again and again: only what is new is parsed
    reader.read()["loss"].values[-1]

    few = spikes_kept(loss.values, buckets=500)  # which points to draw
    loss.steps[few], loss.values[few]

Whatever stands in the files, nothing here raises but what a disk or a store does not give. It imports no JAX.
"""

from __future__ import annotations

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
from gregale.storage.jsonl_reader import Entry, damage, entry_of, read_entries

ROUNDS = "rounds.jsonl"
LARGEST = 2.0**1000  # what is not below it is no figure
_SAMPLE = re.compile(r"^--- step (\d{1,15})$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Column:
    """One figure of a run.

    - `steps`: [point] int64, ascending
    - `values`: [point] float64; NaN where the run wrote that there is no number
    """

    steps: np.ndarray
    values: np.ndarray

    def at(self, step: int) -> float | None:
        """Return the value of a step; None if it has no number."""
        found = self.values[self.steps == step]
        return float(found[-1]) if len(found) and np.isfinite(found[-1]) else None


@dataclass(frozen=True)
class Figures(Mapping[str, Column]):
    """The figures of a run by name, in the order in which they first came.

    - `lines`: whole lines of the file
    - `problems`: what is wrong with the file, in sentences
    """

    columns: Mapping[str, Column]
    lines: int = 0
    problems: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def last_step(self) -> int:
        """The last step that has any figure; 0 before the first."""
        return max((int(column.steps[-1]) for column in self.columns.values()), default=0)


@dataclass(frozen=True)
class Sample:
    """What the model wrote after a step, a text for each prompt."""

    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class History:
    """What there is of a run.

    - `name`, `path`: of its folder
    - `config`: its configuration by dotted keys (`model.layers`); empty if it cannot be read
    - `starts`, `changes`: the entries of starts.jsonl and changes.jsonl
    - `rounds`: of an island, the entries of rounds.jsonl
    - `is_running`: whether a process trains it now
    - `problems`: what is damaged or absent, in sentences that name the file
    """

    name: str
    path: str
    config: Mapping[str, Any]
    figures: Figures
    samples: tuple[Sample, ...]
    starts: tuple[Entry, ...]
    changes: tuple[Entry, ...]
    rounds: tuple[Entry, ...]
    is_running: bool
    problems: tuple[str, ...]


def read_history(run: RunPaths) -> History:
    """All that a run has written so far; raises `UserError` if there is no run here."""
    if not run.config.is_file() and not run.metrics.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.yaml. `gregale train` makes one.")
    is_running = is_being_trained(run.path)
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = flat(read_yaml(run.config)[0])
    except UserError as error:
        problems.append(str(error))
    figures = FiguresReader(run.metrics).read()
    entries = [read_entries(place) for place in (run.starts, run.changes, run.path / ROUNDS)]
    problems += [*figures.problems, *(problem for _, problem in entries if problem)]
    samples = samples_in(_content(run.samples).decode(errors="replace"))
    starts, changes, rounds = (found for found, _ in entries)
    texts, told = (starts, changes, rounds), tuple(problems)
    return History(run.path.absolute().name, str(run.path), config, figures, samples, *texts, is_running, told)


class FiguresReader:
    """Reads metrics.jsonl again and again while it grows; what was read before is not parsed again.

    A last line without its end is being written and is passed over; so is, and told, what is no figure. A file that is
    another one now (a resumed run drops lines) is read anew.
    """

    def __init__(self, place: StoragePath):
        self._place = place
        self._is_of: object = None  # which file or object was read
        self._begin()

    def _begin(self) -> None:
        self._columns: dict[str, tuple[array, array]] = {}
        self._read = 0  # bytes of whole lines
        self._lines = self._damaged = self._first_damaged = 0

    def read(self) -> Figures:
        """All figures so far; none if there is no file yet."""
        content = self._added()
        *lines, rest = content.split(b"\n")
        self._read += len(content) - len(rest)
        for line in lines:
            self._lines += 1
            if not self._takes(line):
                self._damaged += 1
                self._first_damaged = self._first_damaged or self._lines
        columns, repeated = {}, 0
        for name, (steps, values) in self._columns.items():
            column = Column(np.array(steps, np.int64), np.array(values, np.float64))
            columns[name], backwards = _ascending(column)
            repeated = max(repeated, backwards)
        return Figures(columns, self._lines, self._problems(repeated))

    def _added(self) -> bytes:
        """What was not read yet."""
        if isinstance(self._place, ObjectPath):
            found = status(self._place)  # a store appends nothing: any other object is read as a whole
            if found == self._is_of:
                return b""
            self._is_of = found
            self._begin()
            return _content(self._place)
        try:
            with open(self._place, "rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._is_of or now.st_size < self._read:
                    self._is_of = now.st_ino
                    self._begin()
                file.seek(self._read)
                return file.read()
        except FileNotFoundError:
            self._begin()
            return b""

    def _takes(self, line: bytes) -> bool:
        """Takes the figures of a line; whether all of it are some."""
        if (entry := entry_of(line, "step")) is None:
            return False
        step = entry["step"]
        sound = True
        for name, value in entry.items():
            kind = type(value)
            if name == "step":
                continue
            if kind in (int, float) and abs(value) < LARGEST:
                number = float(value)
            elif kind is float or value is None:  # NaN or infinite
                number = math.nan
            else:
                sound = False
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(number)
        return sound

    def _problems(self, repeated: int) -> tuple[str, ...]:
        problems = []
        if self._damaged:
            problems.append(damage(self._place, self._damaged, self._lines, self._first_damaged))
        if repeated:
            problems.append(
                f"{self._place}: the steps do not ascend, {repeated:,} come after a later one; of two lines for a step "
                "the last one counts. Two processes may have written it."
            )
        return tuple(problems)


def samples_in(text: str) -> tuple[Sample, ...]:
    """The samples of a samples.txt, by step in the order of the file."""
    found: dict[int, list[str]] = {}
    headings = [*_SAMPLE.finditer(text)]
    ends = [*(each.start() for each in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=False):
        found.setdefault(int(heading[1]), []).append(text[heading.end() : end].strip("\n"))
    return tuple(Sample(step, tuple(texts)) for step, texts in found.items())


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A tree of mappings by dotted keys; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def spikes_kept(values: np.ndarray, buckets: int) -> np.ndarray:
    """Which of many values to draw: of each bucket the least, the largest and the first that is no number.

    - `values`: [point]
    - `buckets`: of equal numbers of points

    Returns indices, ascending: at most 3 a bucket, the first and the last point, and all if they are no more.
    """
    count = len(values)
    if count <= 2 * buckets:
        return np.arange(count)
    size = -(-count // buckets)
    starts = np.arange(0, count, size)
    padded = np.full(len(starts) * size, np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    rows = padded.reshape(-1, size)  # [bucket, point]
    missing = np.isnan(rows)
    known, none = ~missing.all(axis=1), ~np.isfinite(values)
    least = starts + np.where(missing, np.inf, rows).argmin(axis=1)
    most = starts + np.where(missing, -np.inf, rows).argmax(axis=1)
    gaps = np.unique(np.flatnonzero(none) // size, return_index=True)[1]
    return np.unique(np.concatenate([least[known], most[known], np.flatnonzero(none)[gaps], [0, count - 1]]))


def _ascending(column: Column) -> tuple[Column, int]:
    """The column by ascending steps, the last of each step; and how many come after a later one."""
    steps, values = column.steps, column.values
    ahead = np.diff(steps)
    if (ahead > 0).all():
        return column, 0
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(np.diff(steps) > 0, True)
    return Column(steps[last], values[last]), int((ahead < 0).sum())


def _content(place: StoragePath) -> bytes:
    """The bytes of a file or an object; none if it is not there."""
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return b""
