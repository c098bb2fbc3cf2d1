"""The console output of a run: a progress line on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO, cast

from rich import progress as rich_progress
from rich.filesize import decimal
from rich.table import Column

from gregale.formatting import format_duration
from gregale.streams import ResilientStream, printable
from gregale.terminal import Console as Terminal
from gregale.tracking.callback import Callback, Metrics

_PLAIN_INTERVAL_SECONDS = 5.0


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
        """Show the metrics of a step in the progress line."""
        self._show("step", self._training_text(step, metrics), step, self._steps)

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
