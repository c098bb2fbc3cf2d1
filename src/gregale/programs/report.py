"""Provides `gregale report`, which writes one HTML page about one or more runs.

The page compares the runs (their results, their losses at a common point, and their different settings), and has their
charts, samples and configurations.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from gregale.atomic_files import write_bytes
from gregale.errors import UserError
from gregale.formatting import NONE, format_quantity, format_setting, listed
from gregale.programs.command import Command
from gregale.programs.report_charts import (
    ReportRun,
    axes_of,
    groups_of,
    load_chart,
    report_runs,
    rounds_charts,
    schedule_chart,
    silent,
    traffic_chart,
    without_number,
)
from gregale.runs.history import Column, History, RunPaths, Sample, read_history, runs_of
from gregale.runs.sections import section_classes
from gregale.settings import Settings, setting, shown
from gregale.streams import say
from gregale.web.document import Html, Page, Spans, cards, colour_of, element, folded, notice, section, swatch, table

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
    measures = [measure for measure in MEASURES if any(measure.of(run) is not None for run in runs)]
    return _measures_table(runs, measures, True)


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
    return _measures_table(runs, measures, False) if measures else None


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


def _measures_table(runs: Sequence[ReportRun], measures: Sequence[Measure], methods: bool) -> Html:
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


MAX_SAMPLES = 20  # number of steps
MAX_CHARACTERS = 4000  # of a text


def report_page(
    histories: Sequence[History],
    plans: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    live_seconds: float | None = None,
) -> str:
    """Return the report as one HTML file.

    - `plans`: outputs of `gregale plan --json` for some of the runs, matched by name
    - `notes`: notes besides the problems of the runs' files
    - `live_seconds`: as for `Page`
    """
    runs = report_runs(histories)
    title = runs[0].label if len(runs) == 1 else f"{len(runs):,} runs: {listed([run.label for run in runs])}"
    about = f"Written by gregale, {datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S UTC')}."
    page = Page(title, about, [run.on_page for run in runs], axes_of(runs), live_seconds)
    page.add(notice(*notes, *problems_of(runs)))
    if len(runs) == 1:
        page.add(glance(runs[0]))
    else:
        page.add(section("Side by side", overview(runs)))
        page.add(section("At the same point", at_the_same_point(runs)))
        page.add(section("Different settings", differences(runs)))
    for group, charts in groups_of(runs):
        page.add(section(group, page.charts(*charts)))
    if zeros := silent(runs):
        page.add(element("p", f"Always 0: {', '.join(zeros)}.", class_="help"))
    if loads := [*filter(None, map(load_chart, runs))]:
        page.add(section("Experts", page.charts(*loads)))
    _add_synchronisation(page, runs)
    _add_texts(page, runs, plans)
    return page.html()


def problems_of(runs: Sequence[ReportRun]) -> list[str]:
    """Return the problems of the runs' files and metrics, and the runs that still train or that a callback ended."""
    found = []
    for run in runs:
        if run.history.is_running:
            found.append(f"{run.label} is still training; the report is a snapshot.")
        if run.history.stop_reason is not None:
            found.append(f"A callback ended {run.label}: {run.history.stop_reason}.")
        found += run.history.problems
        if not len(run.history.figures):
            found.append(f"{run.label} has no metrics yet: it has logged no step.")
        found += without_number(run)
    return found


def _add_synchronisation(page: Page, runs: Sequence[ReportRun]) -> None:
    single: dict[str, Spans] = {}  # runs with the same schedule share one chart
    for chart in filter(None, map(schedule_chart, runs)):
        single.setdefault(repr(chart.rows), chart)
    charts = [*rounds_charts(runs), *filter(None, [traffic_chart(runs)]), *single.values()]
    if charts:
        page.add(section("Synchronisation", page.charts(*charts)))


def _add_texts(page: Page, runs: Sequence[ReportRun], plans: Sequence[Mapping[str, Any]]) -> None:
    beside = [
        beside_plan(run, plan)
        for run in runs
        for plan in plans  # a plan for the run: it has the configuration's name, or there is only one run
        if len(runs) == 1 or plan.get("name") == run.config("name", run.history.name)
    ]
    page.add(section("Plan and run", *beside))
    for what, of in (
        ("Samples", samples_of),
        ("Machine", lambda run: [machine(run)]),
        ("Changed settings", lambda run: [changes(run)]),
        ("Configuration", lambda run: [configuration(run)]),
    ):
        parts: list[Html | None] = []
        for run in runs:
            own = [part for part in of(run) if part is not None]
            parts += [*([element("h3", labelled(run))] if own and len(runs) > 1 else []), *own]
        page.add(section(what, *parts))


def glance(run: ReportRun) -> Html:
    steps = run.config("steps")
    done = f"{run.history.figures.last_step:,}" + (f" of {steps:,}" if type(steps) is int else "")
    found = [(each, each.of(run)) for each in MEASURES if each.heading != "steps"]
    known = [(each.heading, format_quantity(value, each.unit)) for each, value in found if value is not None]
    return cards([("steps", done), ("method", method(run)), *known, *beginning(run)])


def beginning(run: ReportRun) -> list[tuple[str, str]]:
    """Return the notes of the configuration, and what starts.jsonl has about the first start, each with its name."""
    start = run.history.starts[0] if run.history.starts else {}
    found = [
        ("began", "time", _moment),
        ("devices", "devices", lambda count: f"{count} {start.get('device_kind', '')}"),
        ("version", "gregale", lambda version: f"gregale {version}"),
        ("host", "host", str),
        ("commit", "commit", str),
        ("command", "command", str),
    ]
    notes = run.config("notes")
    told = [("notes", notes)] if isinstance(notes, str) else []
    return told + [(name, of(start[key])) for name, key, of in found if key in start]


def samples_of(run: ReportRun) -> list[Html]:
    """Return the samples by step, the newest open; at most `MAX_SAMPLES` steps, evenly spaced."""
    samples = run.history.samples
    if len(samples) > MAX_SAMPLES:
        indices = {round(index * (len(samples) - 1) / (MAX_SAMPLES - 1)) for index in range(MAX_SAMPLES)}
        samples = [samples[index] for index in sorted(indices)]
    parts = [_sample(sample, sample is samples[-1]) for sample in reversed(samples)]
    if len(run.history.samples) > MAX_SAMPLES:
        note = f"{len(samples)} of {len(run.history.samples):,} steps are shown; samples.txt has all."
        parts.append(element("p", note, class_="help"))
    return parts


def configuration(run: ReportRun) -> Html | None:
    rows = [[element("code", key), format_setting(value)] for key, value in run.history.config.items()]
    title = f"The {len(rows)} settings of {run.label}"
    return folded(title, table(["setting", "value"], rows, label=title)) if rows else None


def machine(run: ReportRun) -> Html | None:
    """Return a table of the run's starts: time, devices, versions."""
    rows = [
        [
            f"{start.get('step', NONE)}",
            element("time", _moment(start.get("time", NONE))),
            f"{start.get('devices', NONE)} {start.get('device_kind', '')}",
            _sizes(start.get("mesh")),
            f"gregale {start.get('gregale', NONE)}, jax {start.get('jax', NONE)}",
            _pairs(start.get("kernels")),
            _pairs(start.get("compiler_options")),
        ]
        for start in run.history.starts
    ]
    headings = ["after step", "time", "devices", "mesh", "versions", "kernels", "compiler options"]
    return table(headings, rows, label="starts") if rows else None


def changes(run: ReportRun) -> Html | None:
    """Return a table of the settings that changed at a resumption."""
    rows = [
        [
            f"{entry.get('step', NONE)}",
            element("time", _moment(entry.get("time", NONE))),
            element("code", key),
            *map(format_setting, both),
        ]
        for entry in run.history.changes
        if isinstance(entry.get("changes"), Mapping)
        for key, change in entry["changes"].items()
        for both in [change if isinstance(change, list) and len(change) == 2 else [None, change]]
    ]
    return table(["after step", "time", "setting", "before", "since"], rows, label="changes") if rows else None


def beside_plan(run: ReportRun, plan: Mapping[str, Any]) -> Html:
    """Return the plan's estimates beside the run's measurements."""
    seconds, tokens = median("step_seconds")(run), plan.get("tokens_per_step")
    names = [name for name in run.history.figures if "memory" in name and "host" not in name]  # of a device
    memory = max((value for name in names if (value := last(name)(run)) is not None), default=None)
    sent = run.axes.get("bytes")
    sent_a_step = None if sent is None else sent.values[-1] / max(sent.steps[-1], 1)
    bound, estimate = plan.get("roofline") or {}, plan.get("estimate") or {}
    estimated = estimate.get("seconds") or bound.get("step_seconds_one_after_another")
    configured = [each for each in (plan.get("methods") or {}).values() if each.get("configured")]
    bytes_a_step = configured[0]["bytes_per_step"]["average"] if configured else None
    estimated_tokens = tokens / estimated if tokens and estimated else None
    compared = [
        ("time of a step", estimated, seconds, "seconds"),
        ("tokens a second", estimated_tokens, median("tokens_per_second")(run), ""),
        (
            "model FLOPs utilisation",
            estimate.get("utilisation") or bound.get("utilisation"),
            median("mfu")(run),
            "share",
        ),
        ("memory of a device at the peak", (plan.get("memory") or {}).get("peak"), memory, "bytes"),
        ("sent over the slow link in a step", bytes_a_step, sent_a_step, "bytes"),
    ]
    rows = [
        [
            name,
            format_quantity(planned, unit),
            format_quantity(found, unit),
            f"{found / planned:.2f}" if found and planned else NONE,
        ]
        for name, planned, found, unit in compared
    ]
    on = (
        f"the plan is for {plan.get('devices')} devices ({plan.get('device_kind')}), compared with a {plan.get('chip')}"
    )
    return element(
        "div",
        table(["", "plan", "measured, median", "measured / plan"], rows, kinds="numbers", label="plan beside run"),
        element("p", f"Of the run {run.label}; {on}.", class_="help"),
    )


def _sample(sample: Sample, opened: bool) -> Html:
    shortened = (text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…" for text in sample.texts)
    texts = (element("pre", text, class_="text") for text in shortened)
    return folded(f"Step {sample.step:,}", *texts, opened=opened)


def _moment(time: object) -> str:
    """Return a time of the run's files, which is in UTC, in fewer signs."""
    return str(time).replace("T", " ").replace("+00:00", " UTC")


def _sizes(mesh: Any) -> str:
    if not isinstance(mesh, Mapping):
        return NONE
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1) or "one device"


def _pairs(found: Any) -> str:
    if not isinstance(found, Mapping) or not found:
        return NONE
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items()
    )


def write_page(path: Path, text: str) -> str:
    """Write a page atomically; return its address for a browser."""
    write_bytes(path, text.encode())
    return path.resolve().as_uri()


SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class ReportOptions(Settings):
    runs: tuple[str, ...] = field(
        metadata={"help": "the runs: directories, URLs, names under runs/, or a fleet's name"}
    )
    output: Path = setting(Path("report.html"), "the path of the page", aliases=("out", "o"))
    plan: tuple[Path, ...] = setting((), "output of `gregale plan --json`, to compare with measurements")

    def __post_init__(self):
        super().__post_init__()
        check_page_path(self.output, "output")
        if not self.runs:
            raise UserError("runs is empty. Usage: gregale report RUN [RUN ...] [--output report.html]")


def main(options: ReportOptions) -> int:
    found, notes = distinct_runs([run for name in options.runs for run in runs_of(name)])
    plans = [read_plan(path) for path in options.plan]
    text = report_page([read_history(run) for run in found], plans, notes)
    address = write_page(options.output, text)
    of = "run" if len(found) == 1 else f"{len(found)} runs"
    size = decimal(len(text.encode()))
    say(f"The report of the {of} is in {options.output} ({size}). Open it in any browser: {address}")
    return 0


def check_page_path(path: Path, key: str) -> None:
    """Raise `UserError` if a page cannot be written to a path, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{key}: {shown(str(path))} is to be a page; its name has to end with .html.")
    if not path.parent.is_dir():
        raise UserError(
            f"{key}: {shown(str(path))} cannot be written, there is no folder {shown(str(path.parent))}: `mkdir -p`."
        )


def distinct_runs(found: Sequence[RunPaths]) -> tuple[list[RunPaths], list[str]]:
    """Return each run once, and notes about runs that were given twice or share a name."""
    single: dict[str, RunPaths] = {}
    notes = []
    for run in found:
        key = os.path.realpath(run.path) if isinstance(run.path, Path) else str(run.path)
        if key in single:
            notes.append(f"{run.path} was given twice; the report has it once.")
        single.setdefault(key, run)
    names = [run.path.absolute().name for run in single.values()]
    for name in dict.fromkeys(names):
        if (count := names.count(name)) > 1:
            notes.append(f"{count} of the runs have the name {name}; they are told apart by their paths.")
    return list(single.values()), notes


def read_plan(path: Path) -> dict[str, Any]:
    """Return a saved plan; raise `UserError` if the file is not the output of `gregale plan --json`."""
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"plan: there is no file {path}. `gregale plan CONFIG --json > {path}` makes one.") from None
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or "roofline" not in plan:
        raise UserError(f"plan: {path} is not the output of `gregale plan CONFIG --json`; it has no roofline.")
    return plan


COMMAND = Command(main=main, options=ReportOptions, positional=("runs",))
