"""The console output of a run, and trackers, which send its metrics to other programs, by `type`."""

import importlib
import importlib.util
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, ClassVar, TextIO, cast

import draccus
from rich import progress as rich_progress
from rich.filesize import decimal
from rich.table import Column

from gregale.errors import KeyedError, UserError, install_hint, told
from gregale.formatting import format_duration
from gregale.settings import Settings, setting
from gregale.storage import StoragePath, write_bytes
from gregale.storage.jsonl import ResumePoint, lines_at
from gregale.streams import ResilientStream, printable
from gregale.terminal import Console as Terminal
from gregale.tracking.callback import Callback, Callbacks, Metrics, RunInfo, finite
from gregale.tracking.metrics import METRICS_FILE

_PLAIN_INTERVAL_SECONDS = 5.0
_KEPT_INTERVAL_SECONDS = 60.0


class Console(Callback):
    """A callback that prints metrics, messages and the progress of preparations.

    On a terminal it redraws one line and prints messages above it. To a file or a pipe it writes plain lines, some
    seconds apart. After its terminal is closed or the reader of its pipe has ended, it drops its output.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        fields: Sequence[str] = (),
        interval_seconds: float = _PLAIN_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        - `fields`: further metrics in the line, such as `replica_bytes`; names with `bytes` get units
        - `interval_seconds`: minimum time between plain lines
        """
        stream = ResilientStream(file or sys.stdout)
        self._rich = Terminal(file=cast(TextIO, stream))
        self._is_live = stream.isatty() and self._rich.is_interactive
        self._fields = tuple(fields)
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._bars: rich_progress.Progress | None = None
        self._tasks: dict[str, rich_progress.TaskID] = {}
        self._steps, self._first = 0, 1
        self._last_plain: dict[str, float] = {}
        self._last_kept = -math.inf

    def begin(self, steps: int, done: int = 0) -> None:
        """Set the number of steps of the run and the number of steps done, before the first `on_step`.

        The first step includes compilation, so there is no estimate for the others before the second step.
        """
        self._steps, self._first = steps, done + 1
        if done < steps:
            text = f"{done}/{steps}  compiling the first step"
            if self._is_live:
                self._show("step", text, done, steps)
            else:
                self.message(f"step {text}")

    def message(self, text: str) -> None:
        """Print a line, above the progress line if there is one."""
        self._rich.print(printable(text), soft_wrap=not self._is_live)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step in the progress line; once a minute in a line of its own, which stays."""
        text, now = self._training_text(step, metrics), self._clock()
        if self._is_live and now - self._last_kept >= _KEPT_INTERVAL_SECONDS:
            self._last_kept = now
            self.message(f"step {text}")
        self._show("step", text, step, self._steps)

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """Print the metrics of an evaluation."""
        shown = "  ".join(_format_metric(name, value) for name, value in metrics.items())
        self.message(f"step {step}/{self._steps}  {shown}")

    def progress(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        """Show the progress of a preparation; its bar disappears when `done` reaches `total`."""
        amount = f"{decimal(done)}/{decimal(total)}" if unit == "bytes" else f"{done}/{total} {unit}"
        self._show(label, amount, done, total)
        if done >= total:
            self._finish(label)

    def close(self) -> None:
        """Stop redrawing; the last line stays."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _training_text(self, step: int, values: Metrics) -> str:
        seconds, speed = values.get("step_seconds"), values.get("tokens_per_second")
        begin = [f"{step}/{self._steps}", _format_metric("loss", values["loss"])]
        if step == self._first:
            return "  ".join([*begin, f"{format_duration(seconds)}, compiling included"] if seconds else begin)
        middle = [f"{speed:,.0f} tokens/s"] if speed else []
        middle += [f"MFU {mfu:.1%}"] if (mfu := values.get("mfu")) else []
        middle += [_format_metric(name, values[name]) for name in self._fields if name in values]
        end = [f"ETA {format_duration(seconds * max(self._steps - step, 0))}"] if seconds else []
        room = self._rich.width - len("- step ") - _bar_width(self._rich.width) - 1
        while self._is_live and middle and len("  ".join([*begin, *middle, *end])) > room:
            middle.pop()
        return "  ".join([*begin, *middle, *end])

    def _show(self, label: str, text: str, done: int, total: int) -> None:
        if self._is_live:
            bars = self._live_bars()
            if label not in self._tasks:
                self._tasks[label] = bars.add_task(printable(label), total=total, text=printable(text))
            bars.update(self._tasks[label], completed=done, total=total, text=printable(text))
            return
        now = self._clock()
        if label not in self._last_plain or done >= total or now - self._last_plain[label] >= self._interval_seconds:
            self._last_plain[label] = now
            self.message(f"{label} {text}")

    def _finish(self, label: str) -> None:
        self._last_plain.pop(label, None)
        if label in self._tasks and self._bars is not None:
            self._bars.remove_task(self._tasks.pop(label))

    def _live_bars(self) -> rich_progress.Progress:
        if self._bars is None:
            one_line = Column(no_wrap=True, overflow="ellipsis")
            bar_width = _bar_width(self._rich.width)
            self._bars = rich_progress.Progress(
                rich_progress.SpinnerColumn("line"),
                rich_progress.TextColumn("{task.description}", markup=False, table_column=one_line.copy()),
                *([rich_progress.BarColumn(bar_width)] if bar_width else []),
                rich_progress.TextColumn("{task.fields[text]}", markup=False, table_column=one_line),
                console=self._rich,
            )
            self._bars.start()
        return self._bars


def _bar_width(columns: int) -> int:
    """Return the width of the progress bar; 0 on a narrow terminal, where the text needs the room."""
    return 24 if columns >= 100 else 8 if columns >= 70 else 0


def _format_metric(name: str, value: float | int | None) -> str:
    label = name.replace("_", " ")
    if value is None:
        return f"{label} none"
    if isinstance(value, int):
        return f"{label} {decimal(value)}" if "bytes" in name else f"{label} {value:,}"
    return f"{label} {value:.4g}" if "loss" not in name else f"{label} {value:.4f}"


class Tracker(Callback, ABC):
    """A callback that logs the metrics of steps and evaluations in the same way."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; further calls for a step may add other metrics."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)


class JsonlTracker(Tracker):
    """Writes one JSON object per call, with null for NaN and infinities, to a line of a file or an object.

    Lines of steps after `resumed_from` and damaged lines are removed. `report` is called with one line when the file
    cannot be written, and when it can be written again.
    """

    def __init__(self, path: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        self._lines = lines_at(path, ResumePoint("step", resumed_from), report)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write `{"step": step, **metrics}`, with numbers of NumPy and JAX as Python's."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in finite(metrics).items()}
        self._lines.add({"step": step} | dict.fromkeys(metrics) | numbers)

    def flush(self) -> None:
        """Write buffered lines; raise `StoreError` if a store cannot be written."""
        self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if they cannot be written."""
        self._lines.close()


class Guarded(Callback):
    """A wrapper of a third-party tracker whose errors (a full disk, no network) never end the run."""

    def __init__(self, tracker: Callback, name: str, report: Callable[[str], None]):
        self._tracker, self._name, self._report = tracker, name, report
        self._has_failed = False

    def on_start(self, run: RunInfo) -> None:
        self._try(lambda: self._tracker.on_start(run))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_step(step, metrics))

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_evaluation(step, metrics))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._report(f"The tracker {self._name} fails; the run continues without it: {told(error)}")
            self._has_failed = True


_WANDB_MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class TrackerConfig(Settings, draccus.ChoiceRegistry):
    """A tracker beside the console and `metrics.jsonl`.

    - `package`: the package that it needs; the extra with the name of the choice installs it
    """

    package: ClassVar[str]

    def open(self, run: RunInfo) -> Callback:
        """Start the tracker for a run."""
        raise AssertionError("only the choices are opened")

    def shown_by(self, folder: StoragePath) -> str:
        """Return a sentence with the command that shows what the tracker has written for a run; "" for none."""
        del folder
        return ""


class _TensorBoardTracker(Tracker):
    def __init__(self, run: RunInfo):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run.files / "tensorboard"), purge_step=run.resumed_from + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@TrackerConfig.register_subclass("tensorboard")
@dataclass(frozen=True)
class TensorBoardConfig(TrackerConfig):
    """Event files in the run directory's `tensorboard/`."""

    package: ClassVar[str] = "tensorboardX"

    def open(self, run: RunInfo) -> Callback:
        return _TensorBoardTracker(run)

    def shown_by(self, folder: StoragePath) -> str:
        return f"TensorBoard: `tensorboard --logdir {folder / 'tensorboard'}`."


class _SessionTracker(Tracker):
    """A tracker for the common interface of W&B and trackio: `log` takes a dictionary and a step."""

    def __init__(self, session: Any):
        self._session = session

    def log(self, step: int, metrics: Metrics) -> None:
        self._session.log(finite(metrics), step=step)

    def close(self) -> None:
        self._session.finish()


@TrackerConfig.register_subclass("wandb")
@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases. A resumed run goes on with its curves there."""

    package: ClassVar[str] = "wandb"

    project: str = setting("gregale", "the project that the run is filed under")
    entity: str | None = setting(None, "the user or team, null for the login's own")
    mode: str = setting(
        "auto",
        "online, offline (files in the run directory), or auto: online with a login, else offline",
        choices=_WANDB_MODES,
    )

    def open(self, run: RunInfo) -> Callback:
        wandb = importlib.import_module(self.package)
        session = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.name,
            id=kept_id(run),
            resume="allow",
            dir=str(run.files),
            config=dict(run.config),
            mode=self._possible_mode(wandb),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _SessionTracker(session)

    def _possible_mode(self, wandb: Any) -> str:
        """Return the mode; offline if there is no login, because W&B would stop and ask for one."""
        wanted = os.environ.get("WANDB_MODE", "online") if self.mode == "auto" else self.mode
        if wanted == "online" and not wandb.login(prompt=False, verify=False):
            return "offline"
        return wanted


def kept_id(run: RunInfo) -> str:
    """Return the id of a run at W&B, which the run's folder keeps; a new run has a new one."""
    path = run.files / "wandb_id.txt"
    if not (run.resumed_from and path.is_file()):
        write_bytes(path, token_hex(4).encode())
    return path.read_text(encoding="ascii")


@TrackerConfig.register_subclass("trackio")
@dataclass(frozen=True)
class TrackioConfig(TrackerConfig):
    """trackio, into its local database; `trackio show` displays it."""

    package: ClassVar[str] = "trackio"

    project: str = setting("gregale", "the project that the run is filed under")

    def open(self, run: RunInfo) -> Callback:
        trackio = importlib.import_module(self.package)
        trackio.init(project=self.project, name=run.name, config=dict(run.config), resume="allow")
        return _SessionTracker(trackio)


def check_each_once(configs: Sequence[TrackerConfig]) -> None:
    """Raise `KeyedError` if a tracker is named twice: both would write to the same files."""
    first: dict[str, int] = {}
    for number, config in enumerate(configs):
        name = TrackerConfig.get_choice_name(type(config))
        if name in first:
            raise KeyedError(
                f"trackers.{number}.type",
                f"is {name}",
                f", and so is trackers.{first[name]}.type; leave one of them out.",
            )
        first[name] = number


def check_installed(configs: Sequence[TrackerConfig]) -> None:
    """Raise `UserError` with the extra that installs it if the package of a chosen tracker is missing."""
    for config in configs:
        if importlib.util.find_spec(config.package) is None:
            name = TrackerConfig.get_choice_name(type(config))
            raise UserError(
                f"trackers: {name} needs the package {config.package}, which is not installed. "
                f"{install_hint(name)} Or leave {name} out of trackers."
            )


def open_trackers(
    configs: Sequence[TrackerConfig], own: Sequence[Callback], run: RunInfo, console: Console
) -> Callbacks:
    """Open `metrics.jsonl` of the run, whose directory exists, and the chosen trackers, and start the callbacks.

    The caller closes the console. A process that writes no files has only its own callbacks. Raises `UserError` as
    `check_installed`.

    - `own`: callbacks of the configuration
    """
    if not run.is_writer:
        return _started(Callbacks(own), run)
    check_installed(configs)
    jsonl = JsonlTracker(run.directory / METRICS_FILE, run.resumed_from, console.message)
    others = (_opened(config, run, console) for config in configs)
    return _started(Callbacks([console, jsonl, *filter(None, others), *own], jsonl.flush), run)


def _started(callbacks: Callbacks, run: RunInfo) -> Callbacks:
    """Start callbacks; close them if one of them fails."""
    with ExitStack() as stack:
        stack.enter_context(callbacks)
        callbacks.on_start(run)
        stack.pop_all()
    return callbacks


def _opened(config: TrackerConfig, run: RunInfo, console: Console) -> Callback | None:
    """Open a tracker whose errors never end the run; return None if it cannot be opened, for example offline."""
    name = TrackerConfig.get_choice_name(type(config))
    try:
        return Guarded(config.open(run), name, console.message)
    except Exception as error:
        console.message(f"The tracker {name} does not open; the run continues without it: {told(error)}")
        return None
