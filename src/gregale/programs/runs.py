"""Provides `gregale runs`, which lists the runs in a folder with state and results."""

import json
import math
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import compress
from pathlib import Path

from gregale.data.sources.base import expand
from gregale.programs.command import Command
from gregale.runs.history import RunPaths, State, Summary, summaries
from gregale.settings import Settings, setting
from gregale.storage import StoragePath, is_url, storage_path
from gregale.streams import say
from gregale.terminal import Console, fitting, print_table
from gregale.tracking.metrics import in_unit

SORTS = (
    *("name", "state", "method", "step", "loss", "eval_loss", "bits_per_byte"),
    *("tokens", "tokens_per_second", "bytes_sent", "began"),
)
STAGE = "stage"  # of runs in stages
HEADINGS = ("run", "state", "step", STAGE, "loss", "eval loss", "method", "tokens/s", "sent", "begun")
DROP_ORDER = ("begun", "sent", "method", "tokens/s")


@dataclass(frozen=True)
class RunsOptions(Settings):
    folder: str = setting("runs", "the folder or URL of the runs, or one of them, or its name")
    state: list[str] = setting(list, "only runs in one of these states", choices=tuple(State))
    method: str | None = setting(None, "only runs whose method matches this, such as `*diloco*`")
    name: str | None = setting(None, "only runs whose name matches this, such as `wide-*`")
    sort: str = setting("name", "the column to sort by, in ascending order", choices=SORTS)
    reverse: bool = setting(False, "sort in descending order")
    json: bool = setting(False, "print everything as JSON, a list of runs")


def main(options: RunsOptions) -> int:
    found = chosen(summaries(folder_of(options.folder)), options)
    if options.json:
        values = [
            # JSON lacks NaN and infinity.
            {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in each}
            for each in (asdict(summary).items() for summary in found)
        ]
        print(json.dumps(values, indent=1, allow_nan=False))
        return 0
    if not found:
        is_filtered = options.state or options.method or options.name
        say(f"{options.folder}: no run {'matches' if is_filtered else 'yet; `gregale train` makes one'}.")
        return 0
    console, now = Console(), time.time()
    kept = [heading != STAGE or any(summary.stage for summary in found) for heading in HEADINGS]
    headings, *rows = (tuple(compress(cells, kept)) for cells in (HEADINGS, *(row(each, now) for each in found)))
    table = fitting(console, headings, rows, DROP_ORDER)
    print_table(console, options.folder, *table)
    for summary in found:
        if summary.problem:
            say(f"{summary.name}: {summary.problem}")
        if summary.stop_reason:
            say(f"{summary.name}: a callback ended it: {summary.stop_reason}.")
    return 0


def folder_of(given: str) -> StoragePath:
    """Return the folder of an option; the name of a run under runs/ stands for its directory, as in other commands."""
    path, named = storage_path(expand(given, "folder")), Path("runs") / given
    is_named = not is_url(given) and RunPaths(named).config.is_file() and not RunPaths(path).config.is_file()
    return named if is_named else path


def chosen(found: list[Summary], options: RunsOptions) -> list[Summary]:
    """Return the runs that the options select, sorted; runs without the metric of `sort` are last."""
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
    """Return the cells of a run's row; `now`: seconds since 1970."""
    steps = "" if summary.steps is None else f"/{summary.steps:,}"
    return (
        summary.name,
        summary.state,
        "" if summary.state is State.IMPORTED else f"{summary.step:,}{steps}",
        summary.stage_text,
        in_unit("loss", summary.loss),
        in_unit("eval_loss", summary.eval_loss),
        summary.method or "",
        "" if summary.tokens_per_second is None else f"{summary.tokens_per_second:,.0f}",
        in_unit("replica_bytes", summary.bytes_sent),
        "" if summary.began is None else ago(summary.began, now),
    )


def ago(began: str, now: float) -> str:
    """Return the age of a time: `5 min ago`, `3 h ago`, `12 days ago`; return a text that is no time unchanged."""
    try:
        seconds = now - datetime.fromisoformat(began).timestamp()
    except ValueError:
        return began
    minutes = max(math.floor(seconds / 60), 0)
    if minutes < 120:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // (24 * 60)} days ago"


COMMAND = Command(main=main, options=RunsOptions, positional=("folder",))
