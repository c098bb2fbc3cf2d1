"""Provides `gregale report`, which writes one HTML page about one or more runs."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.programs.report.page import report_page, write_page
from gregale.programs.watch.command import runs_of
from gregale.runs.history import read_history
from gregale.runs.run_paths import RunPaths
from gregale.settings import Settings, setting, shown
from gregale.streams import say

SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class ReportOptions(Settings):
    runs: tuple[str, ...] = field(
        metadata={"help": "the runs: directories, URLs, names under runs/, or a fleet's name"}
    )
    output: Path = setting(Path("report.html"), "the path of the page")
    plan: tuple[Path, ...] = setting((), "output of `gregale plan --json`, to compare with measurements")

    def __post_init__(self):
        super().__post_init__()
        check_page_path(self.output, "output")
        if not self.runs:
            raise UserError("runs is empty. Usage: gregale report RUN [RUN ...] [--output report.html]")


def main(options: ReportOptions) -> int:
    found, notes = distinct_runs([run for name in options.runs for run in runs_of(name)])
    plans = [read_plan(path) for path in options.plan]
    text = report_page([read_history(run) for run in found], plans, notes)
    address = write_page(options.output, text)
    of = "run" if len(found) == 1 else f"{len(found)} runs"
    size = decimal(len(text.encode()))
    say(f"The report of the {of} is in {options.output} ({size}). Open it in any browser: {address}")
    return 0


def check_page_path(path: Path, key: str) -> None:
    """Raise `UserError` if a page cannot be written to a path, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{key}: {shown(str(path))} is to be a page; its name has to end with .html.")
    if not path.parent.is_dir():
        raise UserError(
            f"{key}: {shown(str(path))} cannot be written, there is no folder {shown(str(path.parent))}: `mkdir -p`."
        )


def distinct_runs(found: Sequence[RunPaths]) -> tuple[list[RunPaths], list[str]]:
    """Return each run once, and notes about runs that were given twice or share a name."""
    single: dict[str, RunPaths] = {}
    notes = []
    for run in found:
        key = os.path.realpath(run.path) if isinstance(run.path, Path) else str(run.path)
        if key in single:
            notes.append(f"{run.path} was given twice; the report has it once.")
        single.setdefault(key, run)
    names = [run.path.absolute().name for run in single.values()]
    for name in dict.fromkeys(names):
        if (count := names.count(name)) > 1:
            notes.append(f"{count} of the runs have the name {name}; they are told apart by their paths.")
    return list(single.values()), notes


def read_plan(path: Path) -> dict[str, Any]:
    """Return a saved plan; raise `UserError` if the file is not the output of `gregale plan --json`."""
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"plan: there is no file {path}. `gregale plan CONFIG --json > {path}` makes one.") from None
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or "roofline" not in plan:
        raise UserError(f"plan: {path} is not the output of `gregale plan CONFIG --json`; it has no roofline.")
    return plan


COMMAND = Command(main=main, options=ReportOptions, positional=("runs",))
