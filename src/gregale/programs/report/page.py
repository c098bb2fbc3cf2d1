"""Provides the page of one or more runs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gregale.formatting import listed
from gregale.programs.report import comparison, run_panels
from gregale.programs.report.metric_charts import groups_of, silent, without_number
from gregale.programs.report.runs import ReportRun, axes_of, shown
from gregale.programs.report.synchronisation import rounds_charts, schedule_chart, traffic_chart
from gregale.runs.history import History
from gregale.web.charts import Spans
from gregale.web.document import Page
from gregale.web.markup import Html, element, notice, section


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
        page.add(run_panels.glance(runs[0]))
    else:
        page.add(section("Side by side", comparison.overview(runs)))
        page.add(section("At the same point", comparison.at_the_same_point(runs)))
        page.add(section("Different settings", comparison.differences(runs)))
    for group, charts in groups_of(runs):
        page.add(section(group, page.charts(*charts)))
    if zeros := silent(runs):
        page.add(element("p", f"Always 0: {', '.join(zeros)}.", class_="help"))
    _add_synchronisation(page, runs)
    _add_texts(page, runs, plans)
    return page.html()


def problems_of(runs: Sequence[ReportRun]) -> list[str]:
    """Return the problems of the runs' files and metrics, and the runs that still train."""
    found = []
    for run in runs:
        if run.history.is_running:
            found.append(f"{run.label} is still training; the report is a snapshot.")
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
        run_panels.beside_plan(run, plan)
        for run in runs
        for plan in plans  # a plan for the run: it has the configuration's name, or there is only one run
        if len(runs) == 1 or plan.get("name") == run.config("name", run.history.name)
    ]
    page.add(section("Plan and run", *beside))
    for what, of in (
        ("Samples", run_panels.samples_of),
        ("Machine", lambda run: [run_panels.machine(run)]),
        ("Changed settings", lambda run: [run_panels.changes(run)]),
        ("Configuration", lambda run: [run_panels.configuration(run)]),
    ):
        parts: list[Html | None] = []
        for run in runs:
            own = [part for part in of(run) if part is not None]
            parts += [*([element("h3", comparison.labelled(run))] if own and len(runs) > 1 else []), *own]
        page.add(section(what, *parts))
