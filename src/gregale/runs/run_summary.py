"""Summaries of runs, from the ends of metrics and the checkpoints' manifests. This module does not import JAX."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from gregale.atomic_files import os_error_text
from gregale.checkpoint.manifest import MANIFEST, METADATA, committed_steps, folder_name, root_of
from gregale.errors import UserError
from gregale.runs.history import LARGEST, flat
from gregale.runs.parsing import read_yaml
from gregale.runs.run_lock import is_being_trained
from gregale.runs.run_paths import RunPaths, is_evaluation
from gregale.storage import StoragePath, StoreError, files_below, names, parallel_map, read_range, status
from gregale.storage.jsonl import HIGHEST_STEP, Entry, entry_of, read_entries

_TAIL_BYTES = 1 << 18  # first read; more follows until the last step and the last evaluation are found
_MAX_TAIL_BYTES = 1 << 24
_OF_A_RUN = {"starts.jsonl", "metrics.jsonl", "checkpoints", "huggingface", "lock"}


class State(StrEnum):
    """The state of a run."""

    RUNNING = "running"  # a process trains it
    COMPLETE = "complete"  # all its steps are done, saved and evaluated, or a callback has ended it
    STOPPED = "stopped"  # the same command would resume it
    DAMAGED = "damaged"  # the newest checkpoint, the configuration or the metrics are damaged
    IMPORTED = "imported"  # an imported model, not a run


@dataclass(frozen=True)
class Summary:
    """The summary of a run; None for a value that does not exist (yet)."""

    name: str
    path: str
    state: State
    problem: str | None = None  # a sentence about damage
    stop_reason: str | None = None  # of the callback that ended it
    step: int = 0  # the last logged one
    steps: int | None = None  # as configured
    stage: int | None = None  # of a run in stages, from 1: that of the newest start
    stages: int | None = None
    loss: float | None = None  # as all metrics: of the last logged step
    eval_loss: float | None = None  # of the last evaluation
    bits_per_byte: float | None = None  # likewise
    method: str | None = None  # `sync.type`, and the codec if averages are quantised
    tokens: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    bytes_sent: float | None = None  # by a device over `replica`, or by an island since its last start
    saved: int | None = None  # the step of the newest checkpoint
    began: str | None = None  # time of the first start, ISO 8601

    @property
    def stage_text(self) -> str:
        """Return `2 of 3` for a run in stages, else an empty text."""
        return "" if self.stage is None or self.stages is None else f"{self.stage} of {self.stages}"


def summaries(folder: StoragePath) -> list[Summary]:
    """Return summaries of a folder's runs, by name, or of the folder if it is a run. Raises `UserError` without one."""
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; runs lie in a folder, such as runs/, or are one, such as runs/NAME.")
    if isinstance(folder, Path) and not folder.is_dir():
        raise UserError(f"{folder} does not exist, so there are no runs in it. `gregale train` makes runs/NAME.")
    here = names(folder)
    if "config.yaml" in here and _OF_A_RUN & set(here):
        return [summary_of(RunPaths(folder))]
    found = parallel_map(lambda name: _summary_in(folder / name), here)
    return [summary for summary in found if summary is not None]


def _summary_in(folder: StoragePath) -> Summary | None:
    """Return the summary of a folder; None if it is no run, or if this process may not list it."""
    try:
        here = set(names(folder))
    except PermissionError:
        return None
    is_run = _OF_A_RUN & here and ("config.yaml" in here or is_being_trained(folder) or "metrics.jsonl" in here)
    try:
        return summary_of(RunPaths(folder)) if is_run else None
    except OSError as error:
        return Summary(folder.name, str(folder), State.DAMAGED, f"It cannot be read: {os_error_text(error)}.")


def summary_of(run: RunPaths) -> Summary:
    is_running = is_being_trained(run.path)  # before the reads, so that a run that ends now has written its last files
    config, problem = _config(run)
    step, evaluation, damage = last_entries(run.metrics)
    saved = run.recorded_checkpoint()
    reason = run.stop_reason(saved)
    done, steps = max(line.get("step", 0) for line in (step, evaluation)), config.get("steps")
    if is_running:
        state, problem = State.RUNNING, None
    elif run.is_imported and not done:
        state = State.IMPORTED
    else:
        problem = problem or checkpoint_problem(run, saved) or (f"{run.metrics} has {damage}." if damage else None)
        complete = reason is not None or _is_complete(run, config, saved, evaluation)
        state = State.DAMAGED if problem else State.COMPLETE if complete else State.STOPPED
    sent, starts = _number(step, "network_bytes_sent"), read_entries(run.starts).entries or ({},)
    return Summary(
        name=run.path.absolute().name,
        path=str(run.path),
        state=state,
        problem=problem,
        stop_reason=None if is_running else reason,
        step=done,
        steps=steps if type(steps) is int else None,
        stage=_whole(starts[-1], "stage"),
        stages=_whole(starts[-1], "stages"),
        loss=_number(step, "loss"),
        eval_loss=_number(evaluation, "eval_loss"),
        bits_per_byte=_number(evaluation, "bits_per_byte"),
        method=_method(config),
        tokens=_number(step, "tokens"),
        tokens_per_second=_number(step, "tokens_per_second"),
        mfu=_number(step, "mfu"),
        bytes_sent=_number(step, "replica_bytes") if sent is None else sent,
        saved=saved,
        began=None if "time" not in starts[0] else str(starts[0]["time"]),
    )


class Tail(NamedTuple):
    """The end of metrics.jsonl.

    - `step`, `evaluation`: the last line of each kind, empty if there is none
    - `damage`: a text about damaged lines
    """

    step: Entry
    evaluation: Entry
    damage: str | None


def last_entries(metrics: StoragePath) -> Tail:
    """Read the end of the file back to the last line of each kind."""
    found = status(metrics)
    size, tail = (found.size if found else 0), _TAIL_BYTES
    while True:
        try:
            content = read_range(metrics, max(size - tail, 0), size) if size else b""
        except FileNotFoundError:
            content = b""
        lines = content.split(b"\n")[0 if tail >= size else 1 : -1]
        entries = [entry for line in reversed(lines) if (entry := entry_of(line, "step")) is not None]
        damaged = len(lines) - len(entries)
        step = next((entry for entry in entries if "loss" in entry), {})
        evaluation = next((entry for entry in entries if "loss" not in entry), {})
        if (step and evaluation) or tail >= min(size, _MAX_TAIL_BYTES):
            return Tail(step, evaluation, f"{damaged} damaged lines among the last {len(lines)}" if damaged else None)
        tail *= 8


def checkpoint_problem(run: RunPaths, noted: int | None) -> str | None:
    """Check the newest checkpoint by names and sizes of its files; return a sentence about damage, or None.

    - `noted`: the step of the newest committed checkpoint, even if it is gone
    """
    if noted is None:
        return None
    there = committed_steps(run.checkpoints)
    if not there:
        return f"{run.checkpoints} has no checkpoint any more, but one of step {noted} was saved."
    if noted not in there:
        newer = there[-1] > noted
        return None if newer else f"The newest checkpoint, of step {noted}, is gone; there is one of step {there[-1]}."
    folder = run.checkpoints / folder_name(noted)
    try:
        wanted = {name: each["bytes"] for name, each in json.loads((folder / MANIFEST).read_bytes())["files"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        return f"{folder / MANIFEST} cannot be read, so the checkpoint of step {noted} cannot."
    sizes = {name: each.size for name, each in files_below(folder).items()}
    bad = [name for name, size in wanted.items() if sizes.get(name) != size]
    return f"{folder}: {len(bad)} files are gone or not whole, {bad[0]} among them." if bad else None


def _is_complete(run: RunPaths, config: Entry, saved: int | None, evaluation: Entry) -> bool:
    """Return whether the last step is done, saved and evaluated; for an island, whether its fleet is complete."""
    steps = config.get("steps")
    if saved is None or type(steps) is not int:
        return False
    evaluates = bool(config.get("data.held_out") or config.get("evaluation.tasks"))
    evaluates = evaluates or any(key.startswith("data.validation.") for key in config)
    if evaluates and not (evaluation.get("step") == saved and is_evaluation(evaluation)):
        return False
    if config.get("islands.lighthouse") is None:
        return saved >= steps
    return _is_of_a_complete_fleet(run.checkpoints / folder_name(saved))


def _is_of_a_complete_fleet(folder: StoragePath) -> bool:
    """Return whether the metadata of an island's checkpoint state that the fleet has completed all rounds."""
    try:
        return json.loads((root_of(folder) / METADATA).read_bytes())["islands"]["complete"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _config(run: RunPaths) -> tuple[Entry, str | None]:
    """Return the configuration by dotted keys, and the error if it cannot be read."""
    try:
        return flat(read_yaml(run.config)[0]), None
    except StoreError:
        raise
    except UserError as error:
        return {}, str(error)


def _method(config: Entry) -> str | None:
    method, codec = config.get("sync.type"), config.get("reduce.codec")
    quantised = method is not None and codec not in (None, "none")
    return f"{method}, {codec}" if quantised else None if method is None else str(method)


def _whole(entry: Entry, name: str) -> int | None:
    value = entry.get(name)
    return value if type(value) is int and 0 < value < HIGHEST_STEP else None


def _number(entry: Entry, name: str) -> float | None:
    """Return a metric of a line; None if it is no number."""
    value: Any = entry.get(name)
    return value if type(value) in (int, float) and abs(value) < LARGEST else None
