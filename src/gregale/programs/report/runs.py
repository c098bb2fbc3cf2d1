"""Provides the runs of a page, with distinct labels and the axes of their charts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gregale.runs.history import Column, History
from gregale.storage.jsonl import HIGHEST_STEP, Entry
from gregale.web.document import Axis, Run

MAX_KNOTS = 1000
AXES = (
    Axis("steps", "Steps"),
    Axis("tokens", "Tokens"),
    Axis("seconds", "Time", "seconds"),
    Axis("bytes", "Bytes over the slow link", "bytes"),
)


@dataclass(frozen=True, eq=False)
class ReportRun:
    """A run on the page."""

    label: str  # its name or, if the name is not unique, its path
    place: int  # its index on the page, from 0
    history: History

    def column(self, name: str) -> Column | None:
        return self.history.figures.get(name)

    @property
    def starts(self) -> list[int]:
        """Return the steps after which the run was started, ascending; without starts that a later start repeats."""
        return [step for step, _ in self._starts]

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Return the boundaries of a run in stages: the steps after which a stage began, and its number from 1."""
        numbered = [(step, start["stage"]) for step, start in self._starts if type(start.get("stage")) is int]
        before = [1, *(number for _, number in numbered)]
        return [each for each, last in zip(numbered, before, strict=False) if each[1] != last]

    @property
    def _starts(self) -> list[tuple[int, Entry]]:
        found: list[tuple[int, Entry]] = []
        for start in reversed(self.history.starts):
            step = start.get("step")
            if type(step) is int and 0 <= step < min([HIGHEST_STEP, *(last for last, _ in found)]):
                found.append((step, start))
        return found[::-1]

    def config(self, key: str, default: Any = None) -> Any:
        return self.history.config.get(key, default)

    @cached_property
    def axes(self) -> dict[str, Column]:
        """Return the values of each axis at the steps of the run, by axis key."""
        found = {"tokens": self.column("tokens"), "seconds": elapsed(self), "bytes": sent(self)}
        return {key: column for key, column in found.items() if column is not None and len(column.steps)}

    @property
    def on_page(self) -> Run:
        return Run(self.label, {key: _knots(column) for key, column in self.axes.items()}, self.stages)


def shown(histories: Sequence[History]) -> list[ReportRun]:
    names = Counter(history.name for history in histories)
    return [
        ReportRun(history.name if names[history.name] == 1 else history.path, place, history)
        for place, history in enumerate(histories)
    ]


def axes_of(runs: Sequence[ReportRun]) -> list[Axis]:
    """Return the steps axis, and the other axes that a run has."""
    return [axis for axis in AXES if axis.key == "steps" or any(axis.key in run.axes for run in runs)]


def elapsed(run: ReportRun) -> Column | None:
    """Return the run's seconds by step over all starts; without logged times, the seconds in steps."""
    if (column := run.column("elapsed_seconds")) is not None:
        return accumulated(column, run.starts)
    if (column := run.column("step_seconds")) is None:
        return None
    seconds = np.where(np.isfinite(column.values), column.values, 0.0)
    return Column(column.steps, np.cumsum(seconds * np.diff(column.steps, prepend=0)))


def accumulated(column: Column, starts: Sequence[int] = ()) -> Column:
    """Return the running total of a count that restarts at 0 with each start of the run.

    - `starts`: the steps after which the run was started; a decrease of the count also marks a start
    """
    finite = np.isfinite(column.values)
    steps, values = column.steps[finite], column.values[finite]
    before = np.append(0.0, values[:-1])
    begins = values < before
    firsts = np.searchsorted(steps, np.array(starts, np.int64), side="right")
    begins[firsts[firsts < len(steps)]] = True
    return Column(steps, values + np.cumsum(np.where(begins, before, 0.0)))


def sent(run: ReportRun) -> Column | None:
    """Return bytes sent over the slow link by step: by a host over the network, else by a device over `replica`."""
    for name in ("network_bytes_sent", "replica_bytes"):
        column = run.column(name)
        if column is not None and np.nanmax(column.values, initial=0.0) > 0:
            return accumulated(column, run.starts) if name == "network_bytes_sent" else column
    return None


def _knots(column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps between which a column is linear, and its values; at most `MAX_KNOTS`, evenly spaced."""
    finite = np.isfinite(column.values)
    steps, values = column.steps[finite], column.values[finite]
    if len(steps) < 3:
        return steps, values
    slopes = np.diff(values) / np.diff(steps)
    bends = np.flatnonzero(np.abs(np.diff(slopes)) > 1e-9 * np.abs(slopes).max()) + 1
    kept = np.concatenate([[0], bends, [len(steps) - 1]])
    if len(kept) > MAX_KNOTS:
        kept = np.unique(np.linspace(0, len(steps) - 1, MAX_KNOTS).round().astype(int))
    return steps[kept], values[kept]
