"""Provides the charts of synchronisation: the logged rounds of islands, and the schedule of replicas in one mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gregale.errors import UserError
from gregale.formatting import format_precise_duration, format_quantity
from gregale.methods.schedule import Schedule
from gregale.programs.report.metric_charts import bins_for, line
from gregale.programs.report.runs import ReportRun
from gregale.runs.history import LARGEST, Column
from gregale.web.document import Lines, Row, Series, Span, Spans, colour_of

MAX_SPANS = 1500
MIN_WAIT_SECONDS = 0.02
PERIODS = 3  # number of a schedule's periods in the chart
ROUND_KINDS = ("under way", "healing", "waited for")
MAX_NAMES = 4
SINCE = ("Seconds since the first round", "seconds")


def rounds_charts(runs: Sequence[ReportRun]) -> list[Spans | Lines]:
    """Return the charts of the islands' rounds; none without islands."""
    found = {run: [each for each in run.history.rounds if _is_round(each)] for run in runs}
    found = {run: rounds for run, rounds in found.items() if rounds}
    if not found:
        return []
    each = max(1, MAX_SPANS // 2 // len(found))
    newest = max(rounds[-1]["round"] for rounds in found.values())
    kept = {run: [one for one in rounds if one["round"] > newest - each] for run, rounds in found.items()}
    kept = {run: rounds for run, rounds in kept.items() if rounds}
    first = min(one["began"] for rounds in kept.values() for one in rounds)
    left = sum(map(len, found.values())) - sum(map(len, kept.values()))
    help = f"The newest {each:,} rounds; {left:,} before them are not drawn." if left else ""
    rows = [Row(run.label, _round_spans(run, rounds, first)) for run, rounds in kept.items()]
    return [
        Spans("rounds", "Rounds of the islands", rows, ROUND_KINDS, SINCE, help, thin=(2,)),
        _over_rounds("round-members", "Members of a round", kept, first, lambda one: len(one.get("members", ())), ""),
        _over_rounds("round-waited", "Waited for a round", kept, first, lambda one: one["waiting_seconds"], "seconds"),
        _over_rounds("round-sent", "Sent in a round", kept, first, lambda one: one.get("bytes_sent", 0), "bytes"),
    ]


def schedule_of(run: ReportRun) -> Schedule | None:
    """Return the configured outer schedule; None if there is none, or if the settings are invalid."""
    if run.config("sync.type") not in ("diloco", "streaming_diloco"):
        return None
    try:
        return Schedule(
            int(run.config("sync.period")),
            int(run.config("sync.fragments", 1)),
            int(run.config("sync.delay", 0)),
            int(run.config("model.layers", 1)),
            str(run.config("sync.pattern", "strided")),
        )
    except (UserError, TypeError, ValueError):
        return None


def schedule_chart(run: ReportRun) -> Spans | None:
    """Return the chart of the SEND and APPLY of fragments over some periods: a row for each fragment."""
    schedule = schedule_of(run)
    if schedule is None:
        return None
    rows: list[list[Span]] = [[] for _ in range(schedule.fragments)]
    for step in range(1, PERIODS * schedule.period + 1):
        fragment = schedule.sent(step)
        if fragment is None or sum(map(len, rows)) >= MAX_SPANS:
            continue
        end = step + schedule.delay
        text = f"Sent after step {step:,}, mixed in after step {end:,}."
        rows[fragment].append(Span(step, max(end, step + schedule.period / 200), 0, text))
    later = "1 step" if schedule.delay == 1 else f"{schedule.delay} steps"
    tau = f", mixed in {later} later" if schedule.delay else ""
    return Spans(
        f"schedule-{run.place}",
        f"Schedule of {run.label}",
        [Row(_fragment(schedule, number), spans) for number, spans in enumerate(rows)],
        ("under way",),
        ("Steps", ""),
        f"The first {PERIODS} of its periods: a fragment is sent every {schedule.period:,} steps{tau}.",
    )


def traffic_chart(runs: Sequence[ReportRun]) -> Lines | None:
    """Return the chart of the bytes that a device sent over the slow link in a step."""
    series = []
    for run in runs:
        column = run.column("replica_bytes")
        if column is None or len(column.steps) < 2 or not np.nanmax(column.values, initial=0.0) > 0:
            continue
        rates = np.diff(column.values) / np.diff(column.steps)  # a stair extends from its point to the next one
        label = "bytes a step" if len(runs) == 1 else run.label
        look = {"colour": colour_of(run.place), "stairs": len(column.steps) < 2000}
        over = Column(column.steps, np.append(rates, rates[-1]))
        series.append(line(run, over, label, bins_for(len(runs)), **look))
    if not series:
        return None
    return Lines("traffic", "Sent over the slow link in a step, of a device", series, "bytes")


def _round_spans(run: ReportRun, rounds: Sequence[Mapping[str, Any]], first: float) -> list[Span]:
    schedule, spans = schedule_of(run), []
    for one in rounds:
        begin, end, waited = one["began"] - first, one["ended"] - first, one["waiting_seconds"]
        text = _of_round(one, schedule)
        spans.append(Span(begin, end, 1 if one.get("healed") else 0, text))
        if waited >= MIN_WAIT_SECONDS:
            spans.append(Span(end - waited, end, 2, f"{format_precise_duration(waited)}; {text}"))
    return spans


def _of_round(one: Mapping[str, Any], schedule: Schedule | None) -> str:
    members = one.get("members", [])
    names = f"{len(members)} members" + (f" ({', '.join(map(str, members))})" if 0 < len(members) <= MAX_NAMES else "")
    what = ""
    if schedule is not None and schedule.fragments > 1:
        what = f"fragment {schedule.round_fragment(one['round'])}, "
    return (
        f"Round {one['round']:,}: {what}{names}, {format_precise_duration(one['ended'] - one['began'])}, "
        f"sent {format_quantity(one.get('bytes_sent', 0), 'bytes')}"
    )


def _over_rounds(key: str, title: str, rounds: Mapping[ReportRun, Sequence[Any]], first: float, of, unit: str) -> Lines:
    series = []
    for run, own in rounds.items():
        points = sorted((one["ended"] - first, of(one)) for one in own)  # a clock may have been set back
        x, y = np.array(points, float).T
        series.append(Series(run.label, x, y, colour=colour_of(run.place), stairs=True))
    return Lines(key, title, series, unit, axis=SINCE)


def _is_round(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of rounds.jsonl has valid values for the charts."""
    numbers = [entry.get("bytes_sent", 0), *(entry.get(name) for name in ("began", "ended", "waiting_seconds"))]
    known = type(entry.get("round")) is int and isinstance(entry.get("members", []), list)
    return known and all(type(number) in (int, float) and abs(number) < LARGEST for number in numbers)


def _fragment(schedule: Schedule, number: int) -> str:
    if schedule.fragments == 1:
        return "everything"
    if number == 0:
        return "0: not in layers"
    layers = schedule.layers_of(number).tolist()
    some = ", ".join(map(str, layers[:3])) + ("…" if len(layers) > 3 else "")
    return f"{number}: layers {some}"
