"""Provides the page of one or more runs."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gregale.atomic_files import write_bytes
from gregale.formatting import NONE, format_quantity, format_setting, listed
from gregale.programs.report import comparison
from gregale.programs.report.comparison import MEASURES, last, median, method
from gregale.programs.report.experts import load_chart
from gregale.programs.report.metric_charts import groups_of, silent, without_number
from gregale.programs.report.runs import ReportRun, axes_of, shown
from gregale.programs.report.synchronisation import rounds_charts, schedule_chart, traffic_chart
from gregale.runs.history import History, Sample
from gregale.web.document import Html, Page, Spans, cards, element, folded, notice, section, table

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
    runs = shown(histories)
    title = runs[0].label if len(runs) == 1 else f"{len(runs):,} runs: {listed([run.label for run in runs])}"
    about = f"Written by gregale, {datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S UTC')}."
    page = Page(title, about, [run.on_page for run in runs], axes_of(runs), live_seconds)
    page.add(notice(*notes, *problems_of(runs)))
    if len(runs) == 1:
        page.add(glance(runs[0]))
    else:
        page.add(section("Side by side", comparison.overview(runs)))
        page.add(section("At the same point", comparison.at_the_same_point(runs)))
        page.add(section("Different settings", comparison.differences(runs)))
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
            parts += [*([element("h3", comparison.labelled(run))] if own and len(runs) > 1 else []), *own]
        page.add(section(what, *parts))


def glance(run: ReportRun) -> Html:
    steps = run.config("steps")
    done = f"{run.history.figures.last_step:,}" + (f" of {steps:,}" if type(steps) is int else "")
    found = [(each, each.of(run)) for each in MEASURES if each.heading != "steps"]
    known = [(each.heading, format_quantity(value, each.unit)) for each, value in found if value is not None]
    return cards([("steps", done), ("method", method(run)), *known])


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
            start.get("time", NONE),
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
        [f"{entry.get('step', NONE)}", entry.get("time", NONE), element("code", key), *map(format_setting, both)]
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
