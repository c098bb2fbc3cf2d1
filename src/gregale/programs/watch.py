"""Provides `gregale watch`, which follows a run, or the islands of a fleet, until completion or Ctrl-C.

A poller reads the files of a run, its state, and its events since the last poll; a view shows them on a terminal.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gregale.errors import UserError
from gregale.formatting import format_duration
from gregale.programs.command import Command
from gregale.runs.history import Figures, FiguresReader, RunPaths, State, Summary, islands_of, runs_of, summary_of
from gregale.settings import Settings, between, setting, whole
from gregale.storage import ObjectPath, StoreError
from gregale.storage.jsonl import read_entries
from gregale.streams import ResilientStream, printable
from gregale.terminal import Console
from gregale.tracking.metrics import CURVES, EVALUATION, METRICS, in_unit, metric_of

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


BARS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"  # for terminals that cannot write these
GAP = " "
LONG = 20  # bars
SHOWN = 95  # percent of the bars of a long line
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
        timed = [(each, snapshot.last(each.name)) for each in METRICS if each.label and each.unit == "s"]
        # Of what only some runs have, 0 is not worth a word.
        spent = {each.label: found for each, found in timed if found or (found is not None and not each.where)}
        steps = max(elapsed - sum(spent.values()), 0.0)
        shares = ", ".join(f"{word} {seconds / elapsed:.0%}" for word, seconds in {"steps": steps, **spent}.items())
        lines.append(f"{format_duration(elapsed)} since it was started: {shares}")
    sent = snapshot.summary.bytes_sent
    used = ((each.label, snapshot.last(each.name)) for each in METRICS if each.label and each.unit == "bytes")
    memory = [f"{word} {decimal(int(size))}" for word, size in used if size]
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


SECONDS, STORE_SECONDS = 1.0, 10.0
PLAIN_SECONDS = 5.0


@dataclass(frozen=True)
class WatchOptions(Settings):
    run: str = field(metadata={"help": "the run: its directory or URL, or its name under runs/; or a fleet's name"})
    seconds: float | None = setting(
        None, "the time between two polls; null: 1, and 10 for a run in an object store", range=between(0.1, 3600)
    )
    once: bool = setting(False, "show the current state, and exit")
    web: bool = setting(False, "also serve a page to a browser on this machine, until Ctrl-C")
    port: int = setting(0, "the port of the page; 0: any free port", range=whole(0, 65_535))
    address: str = setting("127.0.0.1", "the page's address; other than loopback, it adds a secret path")

    def __post_init__(self):
        super().__post_init__()
        if self.once and self.web:
            raise UserError("once and web are both given: a page is served until Ctrl-C; leave one out.")


def main(options: WatchOptions) -> int:
    """Show the run until it is complete; return 0 then and after Ctrl-C, 128 + the number of another signal."""
    runs = runs_of(options.run)
    pollers = {run.path: RunPoller(run) for run in runs}
    seconds = options.seconds or (STORE_SECONDS if isinstance(runs[0].path, ObjectPath) else SECONDS)
    with ExitStack() as stack:
        stop, screen = Stop(), stack.enter_context(Screen())
        stack.enter_context(handled_signals(stop.take))
        if options.web:
            from gregale.programs.live_page import LivePage, served  # late, because the terminal does not need it

            page = LivePage(runs)
            page.now()  # tell of a page that cannot be made
            address = stack.enter_context(served(page.now, options.address, options.port))
            screen.message(f"The page is at {address}")
        while True:
            for run in islands_of(options.run):  # an island may begin after the others
                pollers.setdefault(run.path, RunPoller(run))
            if snapshots := poll_all(pollers.values(), screen):
                complete = all(each.summary.state is State.COMPLETE for each in snapshots)
                ends = options.once or (complete and not options.web)
                screen.show(snapshots, is_last=ends)
                if ends:
                    return 0
            if stop.wait(seconds):
                return stop.code


def poll_all(pollers: Iterable[RunPoller], screen: "Screen") -> list[RunStatus]:
    """Return the current state of the runs and print their events; return none if their store does not answer."""
    try:
        found = [poller.poll() for poller in pollers]
    except StoreError as error:
        screen.message(str(error))
        return []
    for event in (event for _, events in found for event in events):
        screen.message(event)
    return [snapshot for snapshot, _ in found]


class Screen:
    """Output that redraws a view on a terminal; other streams get a plain line after each change, rate-limited."""

    def __init__(self, file: TextIO | None = None):
        stream = ResilientStream(file or sys.stdout)
        self._console = Console(file=cast(TextIO, stream))
        self._live: Live | None = None
        if stream.isatty() and self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        self._printed: dict[str, tuple[str, float]] = {}

    def show(self, snapshots: Sequence[RunStatus], is_last: bool = False) -> None:
        """Show one run, or several side by side; `is_last`: the final view."""
        if self._live is not None:
            several = len(snapshots) > 1
            view = fleet_view(snapshots, self._console) if several else view_of(snapshots[0], self._console)
            self._live.update(view, refresh=True)
            return
        for each in snapshots:
            name, line, now = each.summary.path, plain_line(each), time.monotonic()
            printed, when = self._printed.get(name, ("", -PLAIN_SECONDS))
            if line != printed and (is_last or now - when >= PLAIN_SECONDS):
                self._printed[name] = line, now
                self.message(line)
                if not printed and each.summary.state in (State.STOPPED, State.DAMAGED):
                    self.message(state_sentence(each.summary))

    def message(self, text: str) -> None:
        """Print a line, above the view if there is one."""
        self._console.print(printable(text), soft_wrap=self._live is None)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class Stop:
    """Stop request by a signal; `code` is the exit code of the command."""

    def __init__(self) -> None:
        self._event, self.code = Event(), 0

    def take(self, number: int, _: object) -> None:
        """Handle a signal; Ctrl-C is the normal end of the command, not a failure."""
        self.code = 0 if number == signal.SIGINT else 128 + number
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


@contextmanager
def handled_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` for the signals that end a command, so that it ends between polls and restores the terminal."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


COMMAND = Command(main=main, options=WatchOptions, positional=("run",))
