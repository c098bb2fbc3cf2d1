"""Provides the poller of a run: its files, its state, and its events since the last poll."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gregale.runs.history import Figures, FiguresReader
from gregale.runs.run_paths import RunPaths
from gregale.runs.run_summary import State, Summary, summary_of
from gregale.storage.jsonl import read_entries
from gregale.tracking.metrics import EVALUATION, in_unit, metric_of

Entry = Mapping[str, Any]

MAX_LINE_LENGTH = 1000
WINDOW = 200  # newest lines that determine the speed


@dataclass(frozen=True)
class RunStatus:
    """State of a run at one time."""

    summary: Summary
    figures: Figures
    starts: tuple[Entry, ...] = ()  # the entries of starts.jsonl
    silent_seconds: float | None = None  # time since the poller saw a new line; None before the first one
    stalled: str = ""  # the run's message while its fleet commits no round; else empty

    @property
    def start(self) -> Entry:
        return self.starts[-1] if self.starts else {}

    @property
    def remaining_seconds(self) -> float | None:
        """Return the time until the last step at the recent speed, which includes pauses; None if unknown."""
        summary = self.summary
        if summary.state is not State.RUNNING or summary.steps is None:
            return None
        seconds = seconds_a_step(self.figures)
        return None if seconds is None else seconds * max(summary.steps - summary.step, 0)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        column = self.figures.get(name)
        return None if column is None or column.values[-1] != column.values[-1] else float(column.values[-1])


def seconds_a_step(metrics: Figures) -> float | None:
    """Return the recent time per step, which includes evaluations and checkpoints.

    It is that since the newest start, or since the run took over the step count of a peer.
    """
    elapsed = metrics.get("elapsed_seconds")
    if elapsed is not None and len(elapsed.steps) > 1 and np.isfinite(elapsed.values[-WINDOW:]).all():
        values, steps = elapsed.values[-WINDOW:], elapsed.steps[-WINDOW:]
        gaps = np.diff(steps)
        breaks = ((np.diff(values) < 0) | (gaps > 2 * np.median(gaps))).nonzero()[0]  # each start begins at 0
        first = breaks[-1] + 1 if len(breaks) else 0
        if steps[-1] > steps[first]:
            return float((values[-1] - values[first]) / (steps[-1] - steps[first]))
    seconds = metrics.get("step_seconds")
    return None if seconds is None or not seconds.values[-1] > 0 else float(seconds.values[-1])


class RunPoller:
    """Polls one run; `clock`: the time in seconds."""

    def __init__(self, run: RunPaths, clock: Callable[[], float] = time.monotonic):
        self.run = run
        self._reader, self._clock = FiguresReader(run.metrics), clock
        self._lines, self._came = -1, None
        self._before: RunStatus | None = None

    def poll(self) -> tuple[RunStatus, list[str]]:
        """Return the current state of the run, and its events since the last poll as sentences."""
        summary, metrics = summary_of(self.run), self._reader.read()
        if metrics.lines != self._lines:
            self._came = None if self._lines < 0 else self._clock()
            self._lines = metrics.lines
        silent = None if self._came is None else self._clock() - self._came
        stalled = stalled_line(self.run) if summary.state is State.RUNNING else ""
        now = RunStatus(summary, metrics, read_entries(self.run.starts).entries, silent, stalled)
        events = [] if self._before is None else events_between(self._before, now)
        self._before = now
        return now, events


def events_between(before: RunStatus, now: RunStatus) -> list[str]:
    """Return the events between two polls: starts, evaluations, ends."""
    name, events = now.summary.name, []
    if len(now.starts) > len(before.starts):
        events.append(f"{name} goes on after step {now.start.get('step', 0)}, on {devices(now.start)}.")
    if (step := evaluated_step(now.figures)) > evaluated_step(before.figures):
        metrics = (each for each in evaluations(now.figures) if now.figures[each].steps[-1] == step)
        words = (f"{each.replace('_', ' ')} {in_unit(each, now.last(each))}" for each in metrics)
        events.append(f"{name} step {step:,}: {', '.join(words)}")
    if now.summary.state is not before.summary.state:
        events.append(state_sentence(now.summary))
    if now.stalled != before.stalled:
        events.append(f"{name}: {now.stalled or 'Rounds go on.'}")
    return events


def stalled_line(run: RunPaths) -> str:
    """Return the message of a run whose fleet commits no round; else empty."""
    try:
        return run.stalled.read_bytes().decode(errors="replace")[:MAX_LINE_LENGTH]
    except OSError:
        return ""


def evaluations(metrics: Figures) -> list[str]:
    """Return the names of evaluation metrics, without their standard errors."""
    found = ((name, metric_of(name)) for name in metrics if "_stderr." not in name)
    return [name for name, metric in found if metric is not None and metric.when == EVALUATION]


def evaluated_step(metrics: Figures) -> int:
    """Return the step of the newest evaluation; 0 before the first."""
    return max((int(metrics[name].steps[-1]) for name in evaluations(metrics)), default=0)


def state_sentence(summary: Summary) -> str:
    at = f"step {summary.step:,}" + ("" if summary.steps is None else f" of {summary.steps:,}")
    if summary.state is State.COMPLETE:
        return f"{summary.name} is complete, {at}."
    if summary.state is State.DAMAGED:
        return f"{summary.name} is damaged, {at}: {summary.problem}"
    if summary.state is State.STOPPED:
        return f"{summary.name} has stopped, {at}; the command that started it resumes it."
    return f"{summary.name} is {summary.state}, {at}."


def devices(start: Entry) -> str:
    """Return the devices of a start: `8 TPU v5e (replica 2 x data 4)`."""
    count, kind, mesh = (start.get(name) for name in ("devices", "device_kind", "mesh"))
    if count is None:
        return "devices that it did not name"
    sizes = mesh.items() if isinstance(mesh, Mapping) else ()
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes if size != 1)
    return f"{count} {kind}" + (f" ({shown})" if shown else "")
