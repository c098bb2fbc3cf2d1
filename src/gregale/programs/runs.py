"""`gregale runs`: the runs in a folder, how they stand and what they have come to."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase

from rich.filesize import decimal

from gregale.data.sources.base import expand
from gregale.programs.command import Command
from gregale.runs.run_summary import State, Summary, summaries
from gregale.settings import Settings
from gregale.storage import storage_path
from gregale.streams import say
from gregale.tables import fitting, print_table
from gregale.terminal import Console

SORTS = (
    *("name", "state", "method", "step", "loss", "eval_loss", "bits_per_byte"),
    *("tokens", "tokens_per_second", "bytes_sent", "began"),
)
HEADINGS = ("run", "state", "step", "loss", "eval loss", "method", "tokens/s", "sent", "begun")
FIRST_TO_GO = ("begun", "sent", "method", "tokens/s")


@dataclass(frozen=True)
class RunsOptions(Settings):
    """Options of the command."""

    folder: str = field(default="runs", metadata={"help": "the folder or URL of the runs, or one of them"})
    state: list[str] = field(
        default_factory=list, metadata={"help": "only runs that stand so", "choices": tuple(State)}
    )
    method: str | None = field(
        default=None, metadata={"help": "only runs whose method is like this, for example `*diloco*`"}
    )
    name: str | None = field(default=None, metadata={"help": "only runs whose name is like this, for example `wide-*`"})
    sort: str = field(default="name", metadata={"help": "the order, the least first", "choices": SORTS})
    reverse: bool = field(default=False, metadata={"help": "the largest first"})
    json: bool = field(default=False, metadata={"help": "print everything as JSON, a list of runs"})


def main(options: RunsOptions) -> int:
    """Prints the table, or the JSON."""
    found = chosen(summaries(storage_path(expand(options.folder, "folder"))), options)
    if options.json:
        print(json.dumps([_plain(summary) for summary in found], indent=1, allow_nan=False))
        return 0
    if not found:
        is_filtered = options.state or options.method or options.name
        say(f"{options.folder}: no run {'is like this' if is_filtered else 'yet; `gregale train` makes one'}.")
        return 0
    console, now = Console(), time.time()
    table = fitting(console, HEADINGS, [row(summary, now) for summary in found], FIRST_TO_GO)
    print_table(console, options.folder, *table)
    for summary in found:
        if summary.problem:
            say(f"{summary.name}: {summary.problem}")
    return 0


def chosen(found: list[Summary], options: RunsOptions) -> list[Summary]:
    """Those that the options ask for, in their order; what has no figure to be sorted by comes last."""
    kept = [
        each
        for each in found
        if (not options.state or each.state in options.state)
        and (options.method is None or fnmatchcase(each.method or "", options.method))
        and (options.name is None or fnmatchcase(each.name, options.name))
    ]
    known = [each for each in kept if getattr(each, options.sort) is not None]
    ordered = sorted(known, key=lambda each: getattr(each, options.sort), reverse=options.reverse)
    return ordered + [each for each in kept if getattr(each, options.sort) is None]


def row(summary: Summary, now: float) -> tuple[str, ...]:
    """The cells of a run.

    - `now`: seconds since 1970
    """
    steps = "" if summary.steps is None else f"/{summary.steps:,}"
    return (
        summary.name,
        summary.state,
        "" if summary.state is State.IMPORTED else f"{summary.step:,}{steps}",
        _figure(summary.loss),
        _figure(summary.eval_loss),
        summary.method or "",
        "" if summary.tokens_per_second is None else f"{summary.tokens_per_second:,.0f}",
        "" if summary.bytes_sent is None else decimal(int(summary.bytes_sent)),
        "" if summary.began is None else ago(summary.began, now),
    )


def ago(began: str, now: float) -> str:
    """How long ago a time was: `5 min ago`, `3 h ago`, `12 days ago`; the text itself if it is no time."""
    try:
        seconds = now - datetime.fromisoformat(began).timestamp()
    except ValueError:
        return began
    minutes = max(math.floor(seconds / 60), 0)
    if minutes < 120:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // (24 * 60)} days ago"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _plain(summary: Summary) -> dict:
    """As JSON takes it, with what has no number as null."""
    values = asdict(summary).items()
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}


COMMAND = Command(main=main, options=RunsOptions, positional=("folder",))
