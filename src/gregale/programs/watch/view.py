"""Provides the terminal view of a run or of the islands of a fleet."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gregale.formatting import format_duration
from gregale.programs.watch.run_poller import RunStatus, devices, evaluations
from gregale.runs.run_summary import State
from gregale.streams import printable
from gregale.terminal import Console
from gregale.tracking.metrics import in_unit

BARS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"  # for terminals that cannot write these
GAP = " "
LONG = 20  # bars
SHOWN = 95  # percent of the bars of a long line
CURVES = (
    *("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"),
    *("loss_spread", "outer_grad_cosine", "goodput", "members", "update_ratio", "attention_logit_max"),
)
SPENT = {"data_seconds": "data", "evaluation_seconds": "evaluation", "saving_seconds": "saving"}
SPENT_ELSE = {"inspection_seconds": "inspection", "waiting_seconds": "network", "healing_seconds": "healing"}
COLOURS = {State.RUNNING: "green", State.COMPLETE: "cyan", State.STOPPED: "yellow", State.DAMAGED: "red"}
LINES_BESIDE = 8  # lines of a view besides its curves
SILENT = 10  # durations of a step without new data, after which the view reports a stall
SILENT_SECONDS = 30.0
CURVE = ""  # the heading of the loss's curve
COLUMNS = ("island", "state", "step", "loss", CURVE, "tokens/s", "round", "members", "waited")  # of a fleet
DROP_ORDER = ("waited", "members", "tokens/s", "round")  # columns to drop on a narrow terminal
MIN_CURVE_WIDTH = 8
MAX_WIDTH = 1000


def view_of(snapshot: RunStatus, console: Console) -> RenderableType:
    """Return the view of one run: progress, curves, time by phase, devices."""
    summary = snapshot.summary
    parts: list[RenderableType] = [headline(snapshot)]
    if summary.steps:
        bar = Table.grid()  # a grid, because a bar alone writes no line end
        bar.add_row(ProgressBar(total=summary.steps, completed=summary.step, width=min(console.width - 2, 78)))
        parts.append(bar)
    parts.append(curves(snapshot, console))
    parts += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in facts(snapshot)]
    parts += [Text(snapshot.stalled, style="yellow")] if snapshot.stalled else []
    problems = [*snapshot.figures.problems, *([summary.problem] if summary.problem else [])]
    return Group(*parts, *(Text(printable(problem), style="red") for problem in dict.fromkeys(problems)))


def headline(snapshot: RunStatus) -> Text:
    """Return `quickstart  running  step 250 of 500 (50%)  ETA 1m 48s`."""
    summary = snapshot.summary
    line = Text(overflow="ellipsis", no_wrap=True)
    line.append(printable(summary.name), style="bold").append("  ").append(
        summary.state, style=COLOURS.get(summary.state, "")
    )
    line.append(f"  {progress(snapshot)}")
    silent, seconds = snapshot.silent_seconds, snapshot.last("step_seconds") or 0.0
    if summary.state is State.RUNNING and silent is not None and silent > max(SILENT * seconds, SILENT_SECONDS):
        line.append(f"  nothing new for {format_duration(silent)}", style="yellow")
    return line


def progress(snapshot: RunStatus) -> str:
    summary, remaining = snapshot.summary, snapshot.remaining_seconds
    if summary.state is State.RUNNING and not summary.step:
        return "no step yet: preparing data or compiling"
    share = f" of {summary.steps:,} ({summary.step / summary.steps:.0%})" if summary.steps else ""
    stage = f"  stage {summary.stage_text}" if summary.stage_text else ""
    return f"step {summary.step:,}{share}{stage}" + ("" if remaining is None else f"  ETA {format_duration(remaining)}")


def curves(snapshot: RunStatus, console: Console) -> Table:
    names = [name for name in CURVES if name in snapshot.figures]
    names += [name for name in evaluations(snapshot.figures) if name not in names]
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for name in names[: max(console.height - LINES_BESIDE, 3)]:
        column = snapshot.figures[name]
        width = max(console.width - 36, 8)
        curve = sparkline(column.values, min(width, 60), bars_of(console))
        table.add_row(Text(name.replace("_", " ")[:22]), Text(curve, style="cyan"), in_unit(name, snapshot.last(name)))
    return table


def facts(snapshot: RunStatus) -> list[str]:
    """Return lines about time by phase, memory, bytes sent and devices."""
    lines = []
    if elapsed := snapshot.last("elapsed_seconds"):
        spent = {word: seconds for name, word in SPENT.items() if (seconds := snapshot.last(name)) is not None}
        spent |= {word: seconds for name, word in SPENT_ELSE.items() if (seconds := snapshot.last(name))}
        steps = max(elapsed - sum(spent.values()), 0.0)
        shares = ", ".join(f"{word} {seconds / elapsed:.0%}" for word, seconds in {"steps": steps, **spent}.items())
        lines.append(f"{format_duration(elapsed)} since it was started: {shares}")
    sent = snapshot.summary.bytes_sent
    used = {"host": "host_memory_bytes", "device": "device_memory_bytes", "at most": "device_memory_peak_bytes"}
    memory = [f"{word} {decimal(int(size))}" for word, name in used.items() if (size := snapshot.last(name))]
    memory += [f"sent over the slow link {decimal(int(sent))}"] if sent else []
    lines += [f"memory: {', '.join(memory)}"] if memory else []
    if snapshot.starts:
        method = f", {snapshot.summary.method}" if snapshot.summary.method else ""
        again = f", started {len(snapshot.starts)} times" if len(snapshot.starts) > 1 else ""
        lines.append(f"{devices(snapshot.start)}{method}{again}")
    return lines


def fleet_view(snapshots: Sequence[RunStatus], console: Console) -> RenderableType:
    """Return the view of several runs: a line for each, with its loss curve and the columns that fit the terminal."""
    columns = list(COLUMNS)
    for column in DROP_ORDER:
        if (room := _room_beside(snapshots, columns, console)) >= MIN_CURVE_WIDTH:
            break
        columns.remove(column)
    else:
        room = _room_beside(snapshots, columns, console)
    table = _fleet_table(snapshots, columns, max(room, MIN_CURVE_WIDTH), bars_of(console))
    stalled = [f"{each.summary.name}: {each.stalled}" for each in snapshots if each.stalled]
    return Group(table, *(Text(line, style="yellow") for line in stalled))


def _room_beside(snapshots: Sequence[RunStatus], columns: Sequence[str], console: Console) -> int:
    """Return the width that these columns leave for curves."""
    table = _fleet_table(snapshots, columns, 0, "")
    return console.width - console.measure(table, options=console.options.update(width=MAX_WIDTH)).maximum


def _fleet_table(snapshots: Sequence[RunStatus], columns: Sequence[str], width: int, bars: str) -> Table:
    """Return a table with a row for each run; `width`: width of the curves."""
    table = Table()
    for column in columns:
        justify = "left" if column in ("island", "state", CURVE) else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for each in snapshots:
        summary, loss, waited = each.summary, each.figures.get("loss"), each.last("waiting_seconds")
        known = {
            "island": Text(printable(summary.name)),
            "state": Text(summary.state, style=COLOURS.get(summary.state, "")),
            "step": f"{summary.step:,}" + (f"/{summary.steps:,}" if summary.steps else ""),
            "loss": in_unit("loss", each.last("loss")),
            CURVE: Text("" if loss is None else sparkline(loss.values, width, bars), style="cyan"),
            "tokens/s": in_unit("tokens_per_second", each.last("tokens_per_second")),
            "round": in_unit("round", each.last("round")),
            "members": in_unit("members", each.last("members")),
            "waited": "" if waited is None else format_duration(waited),
        }
        table.add_row(*(known[column] for column in columns))
    return table


def plain_line(snapshot: RunStatus) -> str:
    """Return the line about a run for a stream that is no terminal."""
    parts = [f"{snapshot.summary.name} {snapshot.summary.state}", progress(snapshot)]
    parts += [snapshot.stalled] if snapshot.stalled else []
    for name, label in {"loss": "loss ", "eval_loss": "eval loss ", "tokens_per_second": "", "mfu": "MFU "}.items():
        if (value := snapshot.last(name)) is not None:
            parts.append(f"{label}{in_unit(name, value)}")
    return "  ".join(parts)


def bars_of(console: Console) -> str:
    """Return the characters of curves; a terminal's encoding may lack the bars."""
    try:
        BARS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BARS


def sparkline(values: np.ndarray, width: int, bars: str = BARS) -> str:
    """Return values as a line of at most `width` bars, each the mean of equally many values.

    A bar without finite values is a gap. A long line clips the highest twentieth, so that the high losses of the first
    steps, and spikes, do not flatten the curve.

    - `values`: [point]
    """
    if not len(values) or width < 1:
        return ""
    parts = np.array_split(values, min(width, len(values)))
    means = np.array([known.mean() if len(known := part[np.isfinite(part)]) else np.nan for part in parts])
    known = means[np.isfinite(means)]
    if not len(known):
        return GAP * len(means)
    low, high = known.min(), np.percentile(known, SHOWN) if len(known) >= LONG else known.max()
    heights = np.nan_to_num(np.minimum((means - low) / (high - low), 1) if high > low else np.zeros(len(means)))
    indices = np.minimum((heights * len(bars)).astype(int), len(bars) - 1)
    return "".join(bars[index] if np.isfinite(mean) else GAP for index, mean in zip(indices, means, strict=True))
