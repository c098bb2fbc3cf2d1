"""Provides the comparison of runs: their results, their losses at a common point, and their different settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gregale.formatting import NONE, format_quantity, format_setting
from gregale.programs.report.runs import ReportRun, axes_of
from gregale.runs.history import Column
from gregale.runs.sections import section_classes
from gregale.web.document import Html, colour_of, element, swatch, table

END = 0.02  # the last share of a run, over which a loss is averaged
NOT_COMPARED = {"name", *(f"{key}.{each}" for key, kind in section_classes().items() for each in kind.naming_keys)}


Value = Callable[[ReportRun], float | None]


@dataclass(frozen=True)
class Measure:
    """A column of the table, or a card of a single run."""

    heading: str
    of: Value
    unit: str = ""
    better: Callable[[list[float]], float] | None = None  # returns the best of the runs' values; None: no value is best
    loss: bool = False  # the cell has four decimal places and no unit

    def cells(self, runs: Sequence[ReportRun]) -> list[object]:
        """Return a cell for each run, with a mark on the best unless all values are equal."""
        values = [self.of(run) for run in runs]
        known = [value for value in values if value is not None]
        best = self.better(known) if self.better and len(set(known)) > 1 else None
        return [self._cell(value, value is not None and value == best) for value in values]

    def _cell(self, value: float | None, is_best: bool) -> object:
        if value is None:
            return NONE
        text, mark = f"{value:.4f}" if self.loss else format_quantity(value, self.unit), "best" if is_best else None
        return element("data", text, value=value, class_=mark, title=mark)


def reduced(name: str, fold: Callable[[np.ndarray], float]) -> Value:
    return lambda run: _reduced(run.column(name), fold)


def last(name: str) -> Value:
    return reduced(name, lambda values: values[-1])


def median(name: str) -> Value:
    return reduced(name, np.median)


def steps(run: ReportRun) -> float:
    return run.history.figures.last_step


def along(axis: str) -> Value:
    """Return a function that gets a run's last value on an axis."""
    return lambda run: float(steps(run)) if axis == "steps" else _reduced(run.axes.get(axis), lambda values: values[-1])


def end_loss(run: ReportRun) -> float | None:
    """Return the training loss, averaged over the last steps."""
    return loss_before(run, "steps", float(steps(run)))


def loss_before(run: ReportRun, axis: str, point: float) -> float | None:
    """Return the training loss, averaged over the last steps before a point of an axis; None if the run lacks it.

    A sparsely logged loss is interpolated. At the end of the run the result is `end_loss` on each axis.
    """
    column = run.column("loss")
    if column is None or not len(column.steps):
        return None
    step = _step_at(run, axis, point)
    if step is None:
        return None
    step = float(column.steps[-1]) if step >= steps(run) else step
    finite = np.isfinite(column.values)
    where, values = column.steps[finite], column.values[finite]
    near = values[(where > step * (1 - END)) & (where <= step)]
    if not len(near) and len(where) and where[0] <= step <= where[-1]:
        near = np.interp([step], where, values)
    return float(near.mean()) if len(near) else None


def held_out_before(run: ReportRun, axis: str, point: float) -> float | None:
    column = run.column("eval_loss")
    where = None if column is None else _over(run, axis, column)
    if column is None or where is None:
        return None
    before = column.values[(where <= point * (1 + 1e-9)) & np.isfinite(column.values)]
    return float(before[-1]) if len(before) else None


def method(run: ReportRun) -> str:
    kind, period = run.config("sync.type"), run.config("sync.period")
    name = NONE if kind is None else str(kind)
    islands = "islands, " if run.history.rounds else ""
    return f"{islands}{name}{f', H {period}' if period and kind != 'psdp' else ''}"


MEASURES = (
    Measure("steps", steps),
    Measure("tokens", along("tokens")),
    Measure("loss at the end", end_loss, "nats a token", better=min, loss=True),
    Measure("held-out loss", last("eval_loss"), "nats a token", better=min, loss=True),
    Measure("least held-out", reduced("eval_loss", np.min), "nats a token", better=min, loss=True),
    Measure("bits per byte", last("bits_per_byte"), better=min, loss=True),
    Measure("tokens/s, median", median("tokens_per_second"), better=max),
    Measure("MFU, median", median("mfu"), "share", better=max),
    Measure("time", along("seconds"), "seconds"),
    Measure("over the slow link", along("bytes"), "bytes"),
)


def overview(runs: Sequence[ReportRun]) -> Html:
    return _table(runs, [measure for measure in MEASURES if any(measure.of(run) is not None for run in runs)], True)


def at_the_same_point(runs: Sequence[ReportRun]) -> Html | None:
    """Return the losses at the last point that all runs reached, on each axis that all have."""
    measures = []
    for axis in axes_of(runs):
        ends = [along(axis.key)(run) for run in runs]
        if any(end is None or end <= 0 for end in ends):
            continue
        point = min(end for end in ends if end is not None)
        where = f"{format_quantity(point, axis.unit)}{'' if axis.unit else f' {axis.label.lower()}'}"
        for what, of in (("loss", loss_before), ("held out", held_out_before)):
            value = partial(of, axis=axis.key, point=point)
            measures.append(Measure(f"{what} at {where}", value, better=min, loss=True))
    measures = [each for each in measures if sum(each.of(run) is not None for run in runs) > 1]
    return _table(runs, measures, False) if measures else None


def differences(runs: Sequence[ReportRun]) -> Html | None:
    """Return a table of the settings in which the runs differ; None without differences."""
    known = [run for run in runs if run.history.config]
    keys = dict.fromkeys(key for run in known for key in run.history.config)
    rows = []
    for key in keys:
        values = [format_setting(run.config(key)) if key in run.history.config else NONE for run in known]
        if key not in NOT_COMPARED and len(set(values)) > 1:
            rows.append([element("code", key), *values])
    return table(["setting", *(labelled(run) for run in known)], rows, label="differences") if rows else None


def labelled(run: ReportRun) -> Html:
    return element("span", swatch(colour_of(run.place)), run.label)


def _table(runs: Sequence[ReportRun], measures: Sequence[Measure], methods: bool) -> Html:
    columns = [measure.cells(runs) for measure in measures]
    rows = [
        [labelled(run), *([method(run)] if methods else []), *(cells[index] for cells in columns)]
        for index, run in enumerate(runs)
    ]
    headings = ["run", *(["method"] if methods else []), *(measure.heading for measure in measures)]
    return table([element("button", each, type="button") for each in headings], rows, "numbers runs", label="runs")


def _step_at(run: ReportRun, axis: str, point: float) -> float | None:
    over = run.axes.get(axis)
    if axis == "steps" or over is None:
        return point if axis == "steps" else None
    return float(steps(run) if point >= over.values[-1] else np.interp(point, over.values, over.steps))


def _over(run: ReportRun, axis: str, column: Column) -> np.ndarray | None:
    """Return the axis values of the points of a column."""
    if axis == "steps":
        return column.steps.astype(np.float64)
    over = run.axes.get(axis)
    return None if over is None else np.interp(column.steps, over.steps, over.values)


def _reduced(column: Column | None, fold: Callable[[np.ndarray], float]) -> float | None:
    finite = np.zeros(0) if column is None else column.values[np.isfinite(column.values)]
    return float(fold(finite)) if len(finite) else None
