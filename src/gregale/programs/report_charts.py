"""The runs of a report's page, with distinct labels and the axes of their charts, and the charts.

The charts show the metrics of runs, the loads of experts, and the synchronisation: rounds, schedule and traffic.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np

from gregale.errors import UserError
from gregale.formatting import format_precise_duration, format_quantity
from gregale.methods.schedule import Schedule
from gregale.runs.history import LARGEST, Column, History, spikes_kept
from gregale.storage.jsonl import HIGHEST_STEP, Entry
from gregale.tracking.metrics import CHARTS, LEFT_OUT, OF_A_PART, OF_A_START, POSITION_LOSS, SMOOTHED, Chart, metric_of
from gregale.web.document import Axis, Lines, Row, Run, Series, Span, Spans, colour_of

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


def report_runs(histories: Sequence[History]) -> list[ReportRun]:
    names = Counter(history.name for history in histories)
    return [
        ReportRun(history.name if names[history.name] == 1 else history.path, place, history)
        for place, history in enumerate(histories)
    ]


def axes_of(runs: Sequence[ReportRun]) -> list[Axis]:
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


MAX_BINS = 1000  # of a line; a chart is rarely wider in pixels
BINS_IN_ALL = 2500  # of one metric over all runs
MIN_BINS = 40
DOTS = 200  # a line with fewer points shows dots
TITLES = {"loss": "Training loss", "eval_loss": "Held-out loss"}


def groups_of(runs: Sequence[ReportRun]) -> Iterator[tuple[str, list[Lines]]]:
    """Yield the headings with their charts; metrics with unknown names are under "More".

    Metrics of single layers are shown only for one run, because several runs would have hundreds of lines.
    """
    without = LEFT_OUT.union(silent(runs))
    left = [*dict.fromkeys(name for run in runs for name in run.history.figures if name not in without)]
    if len(runs) > 1:
        left = [name for name in left if OF_A_PART not in name]
    found: dict[str, list[Lines]] = {}
    if positions := [name for name in left if name.startswith(POSITION_LOSS)]:
        found["Loss"] = [_by_position(positions, runs)]
        left = [name for name in left if name not in positions]
    for chart in CHARTS:
        names = [name for name in left if re.fullmatch(chart.names, name)]
        left = [name for name in left if name not in names]
        split = chart.alone and len(runs) > 1
        for some in [[name] for name in names] if split else [names] if names else []:
            titled = replace(chart, title=TITLES.get(some[0], some[0])) if split else chart
            found.setdefault(chart.group, []).append(_chart(titled, some, runs))
    for name in left:
        found.setdefault("More", []).append(_chart(Chart("More", name, name), [name], runs))
    yield from found.items()


def silent(runs: Sequence[ReportRun]) -> list[str]:
    """Return the metrics that are always 0 in all runs."""
    columns: dict[str, list[Column]] = {}
    for run in runs:
        for name, column in run.history.figures.items():
            columns.setdefault(name, []).append(column)
    return [name for name, found in columns.items() if all((column.values == 0).all() for column in found)]


def without_number(run: ReportRun) -> list[str]:
    """Return a sentence for each metric that has steps without a finite value."""
    sentences = []
    for name, column in run.history.figures.items():
        missing = column.steps[~np.isfinite(column.values)]
        if len(missing):
            some = (
                "all of its" if len(missing) == len(column.steps) else f"{len(missing):,} of its {len(column.steps):,}"
            )
            sentences.append(f"{run.label}: `{name}` is no number at {some} steps, first at step {missing[0]:,}.")
    return sentences


def line(run: ReportRun, column: Column, label: str, bins: int, **look) -> Series:
    """Return a line with few points, all spikes, and the means for smoothing."""
    kept = spikes_kept(column.values, bins)
    means = None if len(kept) == len(column.steps) else _means(column, bins)
    return Series(label, column.steps[kept], column.values[kept], means, run=run.place, **look)


def bins_for(runs: int) -> int:
    """Return the maximum number of bins of a line, for this number of runs."""
    return max(MIN_BINS, min(MAX_BINS, BINS_IN_ALL // runs))


def _chart(chart: Chart, names: Sequence[str], runs: Sequence[ReportRun]) -> Lines:
    series = []
    for run in runs:
        for index, name in enumerate(names):
            column = run.column(name)
            if column is None or not len(column.steps):
                continue
            if re.fullmatch(OF_A_START, name) and name != "step_seconds":
                column = accumulated(column, run.starts)
            short = name.partition(OF_A_PART)[2] or name  # the chart's heading has the rest of a layer's metric
            label = short if len(runs) == 1 else run.label if len(names) == 1 else f"{run.label}: {name}"
            series.append(
                line(
                    run,
                    column,
                    label,
                    bins_for(len(runs) * len(names)),
                    colour=colour_of(index if len(runs) == 1 else run.place),
                    dashed=len(runs) > 1 and index > 0,
                    dots=len(column.steps) < DOTS and not chart.stairs,
                    stairs=chart.stairs,
                    smooth=bool(re.fullmatch(SMOOTHED, name)),
                )
            )
    unit = chart.unit_of(names[0])
    key = quote(f"figures-{names[0]}", errors="surrogatepass")  # quoted, so that HTML keeps any name
    return Lines(key, chart.title, series, unit, help=chart.help or _meaning(names), clipped=chart.clipped)


def _by_position(names: Sequence[str], runs: Sequence[ReportRun]) -> Lines:
    """Return the chart of the last losses of each run by position, at the first position of each range."""
    series = []
    for run in runs:
        columns = {int(name.removeprefix(POSITION_LOSS)): run.column(name) for name in names}
        last = [(first, each.values[-1]) for first, each in columns.items() if each is not None and len(each.steps)]
        if last:
            x, y = (np.array(part) for part in zip(*sorted(last), strict=True))
            series.append(Series(run.label, x, y, colour=colour_of(run.place), dots=True))
    title, axis = "Held-out loss by position in the document", ("Position", "")
    return Lines("figures-by-position", title, series, axis=axis, help="Nats per token, of the last evaluation.")


def _meaning(names: Sequence[str]) -> str:
    """Return the meaning of a chart's only metric as a sentence; else empty."""
    metric = metric_of(names[0]) if len(names) == 1 else None
    if metric is None:
        return ""
    words = metric.meaning.replace("`", "")
    return f"{words[:1].upper()}{words[1:]}."


def _means(column: Column, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last step of each bin, and the mean of its finite values."""
    size = -(-len(column.steps) // bins)
    starts = np.arange(0, len(column.steps), size)
    finite = np.isfinite(column.values)
    sums = np.add.reduceat(np.where(finite, column.values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    ends = np.append(starts[1:], len(column.steps)) - 1
    with np.errstate(invalid="ignore"):
        return column.steps[ends], sums / counts


EXPERT_LOADS = "expert_load_max/layer."
LOAD_LIMITS = (1.25, 1.5, 2.0, 4.0)  # between the kinds


def load_chart(run: ReportRun) -> Spans | None:
    """Return the largest load of each layer over the steps; None for a run without experts."""
    layers = sorted(
        int(name.removeprefix(EXPERT_LOADS)) for name in run.history.figures if name.startswith(EXPERT_LOADS)
    )
    if not layers:
        return None
    kinds = (
        f"up to {LOAD_LIMITS[0]:g}",
        *(f"{low:g} to {high:g}" for low, high in pairwise(LOAD_LIMITS)),
        f"over {LOAD_LIMITS[-1]:g}",
    )
    return Spans(
        f"loads-{run.place}",
        f"Largest load of an expert over the mean, {run.label}",
        [Row(f"layer {layer}", _load_spans(run, f"{EXPERT_LOADS}{layer}")) for layer in layers],
        kinds,
        ("Steps", ""),
        "A row is a layer. 1: all experts have equally many tokens.",
    )


def _load_spans(run: ReportRun, name: str) -> Sequence[Span]:
    column = run.history.figures[name]
    ends = [*column.steps.tolist()[1:], run.history.figures.last_step]
    return [
        Span(step, max(end, step + 1), sum(value > limit for limit in LOAD_LIMITS), f"Step {step:,}: {value:.2f}")
        for step, end, value in zip(column.steps.tolist(), ends, column.values.tolist(), strict=True)
    ]


MAX_SPANS = 1500
MIN_WAIT_SECONDS = 0.02
SHOWN_PERIODS = 3  # number of a schedule's periods in the chart
ROUND_KINDS = ("under way", "healing", "waited for")
MAX_NAMES = 4
SINCE_FIRST_ROUND = ("Seconds since the first round", "seconds")


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
        Spans("rounds", "Rounds of the islands", rows, ROUND_KINDS, SINCE_FIRST_ROUND, help, thin=(2,)),
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
    for step in range(1, SHOWN_PERIODS * schedule.period + 1):
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
        f"The first {SHOWN_PERIODS} of its periods: a fragment is sent every {schedule.period:,} steps{tau}.",
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
    return Lines(key, title, series, unit, axis=SINCE_FIRST_ROUND)


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
