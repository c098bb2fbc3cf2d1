"""A run on a disk or in a store: the paths of its files, their readers, and summaries of runs.

The readers (of metrics, samples, configuration, starts, rounds) also work while the run writes. The content of the
files raises no error; only a failing disk or store does. A summary is made of the ends of the metrics and of the
checkpoints' manifests. This module does not import JAX, so that programs that only read start fast.
"""

import json
import math
import os
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from gregale.atomic_files import os_error_text
from gregale.checkpoint.manifest import MANIFEST, committed_steps, folder_name, read_manifest, read_metadata
from gregale.errors import UserError
from gregale.runs.parsing import read_yaml
from gregale.runs.run_lock import LOCK, is_being_trained
from gregale.runs.sections import section_classes
from gregale.storage import (
    ObjectPath,
    StoragePath,
    StoreError,
    files_below,
    is_url,
    names,
    parallel_map,
    read_range,
    status,
    storage_path,
)
from gregale.storage.jsonl import HIGHEST_STEP, Entry, damage, entry_of, read_entries
from gregale.tracking.metrics import METRICS_FILE

FLEET, COORDINATOR = ".islands", "lighthouse"  # of a fleet: the ending of its folder, and the name of one of its logs


class File(str):
    """The name of a file or a folder of a run; of an instance of `RunPaths`, its path."""

    @overload
    def __get__(self, run: None, _: type | None = None) -> str: ...
    @overload
    def __get__(self, run: "RunPaths", _: type | None = None) -> StoragePath: ...
    def __get__(self, run, _=None):
        return self if run is None else run.path / self


class Saved(NamedTuple):
    """The newest committed checkpoint, even if it is gone."""

    step: int | None = None  # None before the first
    stop_reason: str | None = None  # of the callback that ended the run there


@dataclass(frozen=True)
class RunPaths:
    path: StoragePath
    config = File("config.yaml")
    checkpoints = File("checkpoints")
    huggingface = File("huggingface")  # of an imported model, or of the imported one from which the run started
    samples = File("samples.txt")
    metrics = File(METRICS_FILE)
    changes = File("changes.jsonl")  # a line for each resume with a changed configuration
    starts = File("starts.jsonl")  # a line for each start or resume, with devices and compiler options
    rounds = File("rounds.jsonl")  # a line for each round of a run that a network joins with others
    address = File("island.address")  # of an island, for its own hosts
    stalled = File("island.stalled")  # an island's message while no round is committed; empty or absent otherwise
    profiles = File("profiles")
    lock = File(LOCK)
    newest_checkpoint = File("newest_checkpoint.json")  # its step, and the reason of a callback that ended the run

    @property
    def is_imported(self) -> bool:
        """Whether `gregale import` created the directory, which then has a model and no checkpoints."""
        return isinstance(folder := self.huggingface, Path) and any(folder.glob("*.safetensors"))

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint, a mapping of mappings; nothing if it has none, or is damaged."""
        try:
            return read_metadata(self.checkpoints / folder_name(step))
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def saved(self) -> Saved:
        try:
            record = json.loads(self.newest_checkpoint.read_bytes())
            step, reason = int(record["step"]), record.get("stop_reason")
        except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return Saved()
        return Saved(step, None if reason is None else str(reason))


def find_run(name: str) -> RunPaths:
    """Find a run directory by its URL, its path, or its name under runs/.

    If both are runs, a name with a `/` is a path. Raises `UserError` if neither is a run, or a bare name is ambiguous.
    """
    if is_url(name):
        run = RunPaths(storage_path(name))
        if not run.config.is_file():
            raise UserError(f"{name} is not a run directory: there is no object {run.config}.")
        return run
    paths = list(dict.fromkeys([Path(name), Path("runs") / name]))
    runs = [path for path in paths if os.path.isfile(str(RunPaths(path).config))]  # False for an invalid path
    if len(runs) == 2 and "/" not in name:
        raise UserError(f"{name} could be ./{runs[0]} or {runs[1]}: both are run directories; give one as a path.")
    if runs:
        return RunPaths(runs[0])
    if name.endswith((".yaml", ".yml")) and os.path.isfile(name):
        raise UserError(f"{name} is a file, perhaps the configuration of a run; its key `name` names the run.")
    states = {True: "has no config.yaml", False: "does not exist"}
    found = " and ".join(f"{path} {states[os.path.exists(path)]}" for path in paths)
    known = sorted(config.parent.name for config in Path("runs").glob(f"*/{RunPaths.config}"))
    hint = f"The runs here are {', '.join(known)}." if known else "`gregale train` makes one."
    raise UserError(f"{name} is not a run directory: {found}. {hint}")


def runs_of(name: str) -> list[RunPaths]:
    """Return the run with a name, or the runs of a fleet's islands that have begun."""
    if found := islands_of(name):
        return found
    try:
        return [find_run(name)]
    except UserError:
        if not (logs := logs_of(name)):
            raise
        raise UserError(
            f"{name} is a fleet without a run: its islands still prepare their data, or have ended before that. "
            f"Their logs are in {logs[0].parent}."
        ) from None


def islands_of(name: str) -> list[RunPaths]:
    """Return the runs of a fleet's islands that have begun; none if this is no fleet."""
    islands = [log.parent.parent / log.stem for log in logs_of(name)]
    return [RunPaths(island) for island in islands if island.is_dir()]


def logs_of(name: str) -> list[Path]:
    """Return the log of each island of a fleet, sorted by name; none if this is no fleet."""
    for folder in (Path(f"{name}{FLEET}"), Path("runs") / f"{name}{FLEET}", Path(name), Path("runs") / name):
        if folder.name.endswith(FLEET):
            logs = [log for log in sorted(folder.glob("*.log")) if log.stem != COORDINATOR]
            if logs:
                return logs
    return []


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl has the result of an evaluation, of text or of tasks alone."""
    if "eval_loss" in line:
        return line["eval_loss"] is not None
    return any(value is not None for name, value in line.items() if name.startswith("acc."))


LARGEST = 2.0**1000  # metrics must be smaller
_SAMPLE = re.compile(r"^--- step (\d{1,15})$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Column:
    """One metric of a run."""

    steps: np.ndarray  # [point] int64, ascending
    values: np.ndarray  # [point] float64; NaN if the run wrote null

    def at(self, step: int) -> float | None:
        """Return the value of a step; None if it has no number."""
        found = self.values[self.steps == step]
        return float(found[-1]) if len(found) and np.isfinite(found[-1]) else None


class Figures(dict[str, Column]):
    """The metrics of a run by name, in the order of their first occurrence.

    - `lines`: number of complete lines of the file
    - `problems`: sentences about damage of the file
    """

    def __init__(self, columns: Mapping[str, Column], lines: int = 0, problems: tuple[str, ...] = ()):
        super().__init__(columns)
        self.lines, self.problems = lines, problems

    @property
    def last_step(self) -> int:
        """The last step that has a metric; 0 before the first."""
        return max((int(column.steps[-1]) for column in self.values()), default=0)


@dataclass(frozen=True)
class Sample:
    """The model's samples after a step, one text for each prompt."""

    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class History:
    """The content of a run directory."""

    name: str
    path: str
    config: Mapping[str, Any]  # by dotted keys (`model.layers`); empty if it cannot be read
    figures: Figures
    samples: tuple[Sample, ...]
    starts: tuple[Entry, ...]  # the entries of starts.jsonl
    changes: tuple[Entry, ...]  # of changes.jsonl
    rounds: tuple[Entry, ...]  # of rounds.jsonl, if a network joins the run with others
    is_running: bool  # whether a process trains the run now
    problems: tuple[str, ...]  # sentences about damaged or absent files
    stop_reason: str | None = None  # of the callback that ended the run


def read_history(run: RunPaths) -> History:
    """Read all files of a run; raise `UserError` if there is no run."""
    if not run.config.is_file() and not run.metrics.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.yaml. `gregale train` makes one.")
    is_running = is_being_trained(run.path)
    config, problem = _config(run)
    metrics = FiguresReader(run.metrics).read()
    entries = [read_entries(path) for path in (run.starts, run.changes, run.rounds)]
    problems = [*filter(None, [problem]), *metrics.problems, *(problem for _, problem in entries if problem)]
    samples = samples_in(_content(run.samples).decode(errors="replace"))
    starts, changes, rounds = (found for found, _ in entries)
    name, path = run.path.absolute().name, str(run.path)
    reason = None if is_running else run.saved().stop_reason
    return History(name, path, config, metrics, samples, starts, changes, rounds, is_running, tuple(problems), reason)


class FiguresReader:
    """Reads metrics.jsonl repeatedly while it grows, and parses only new lines.

    It ignores a last line without a line break, which is being written. It skips and reports damaged lines. A replaced
    file (a resumed run removes lines) is read from the start.
    """

    def __init__(self, path: StoragePath):
        self._path = path
        self._identity: object = None  # identifies the file or object that was read
        self._reset()

    def _reset(self) -> None:
        self._columns: dict[str, tuple[array, array]] = {}
        self._read = 0  # bytes of complete lines
        self._lines = self._damaged = self._first_damaged = 0

    def read(self) -> Figures:
        """Return all metrics so far; none if there is no file yet."""
        content = self._new_content()
        *lines, rest = content.split(b"\n")
        self._read += len(content) - len(rest)
        for line in lines:
            self._lines += 1
            if not self._parse(line):
                self._damaged += 1
                self._first_damaged = self._first_damaged or self._lines
        columns, repeated = {}, 0
        for name, (steps, values) in self._columns.items():
            column = Column(np.array(steps, np.int64), np.array(values, np.float64))
            columns[name], backwards = _ascending(column)
            repeated = max(repeated, backwards)
        return Figures(columns, self._lines, self._problems(repeated))

    def _new_content(self) -> bytes:
        """Return the bytes that were not read yet."""
        if isinstance(self._path, ObjectPath):
            found = status(self._path)  # a store cannot append, so a changed object is read as a whole
            if found == self._identity:
                return b""
            self._identity = found
            self._reset()
            return _content(self._path)
        try:
            with open(self._path, "rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._identity or now.st_size < self._read:
                    self._identity = now.st_ino
                    self._reset()
                file.seek(self._read)
                return file.read()
        except FileNotFoundError:
            self._reset()
            return b""

    def _parse(self, line: bytes) -> bool:
        """Add the metrics of a line to the columns; return whether the whole line is valid."""
        if (entry := entry_of(line, "step")) is None:
            return False
        step = entry["step"]
        is_valid = True
        for name, value in entry.items():
            kind = type(value)
            if name == "step":
                continue
            if kind in (int, float) and abs(value) < LARGEST:
                number = float(value)
            elif kind is float or value is None:  # NaN or infinite
                number = math.nan
            else:
                is_valid = False
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(number)
        return is_valid

    def _problems(self, repeated: int) -> tuple[str, ...]:
        problems = []
        if self._damaged:
            problems.append(damage(self._path, self._damaged, self._lines, self._first_damaged))
        if repeated:
            problems.append(
                f"{self._path}: the steps do not ascend, {repeated:,} come after a later one; of two lines for a step "
                "the last one counts. Two processes may have written it."
            )
        return tuple(problems)


def samples_in(text: str) -> tuple[Sample, ...]:
    """Parse the samples of a samples.txt, by step in the order of the file."""
    found: dict[int, list[str]] = {}
    headings = [*_SAMPLE.finditer(text)]
    ends = [*(each.start() for each in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=False):
        found.setdefault(int(heading[1]), []).append(text[heading.end() : end].strip("\n"))
    return tuple(Sample(step, tuple(texts)) for step, texts in found.items())


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a tree of mappings to dotted keys; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def spikes_kept(values: np.ndarray, bins: int) -> np.ndarray:
    """Select the points of a long line to draw: the smallest, the largest and the first non-finite value of each bin.

    - `values`: [point]
    - `bins`: number of bins, which have equal numbers of points

    Returns ascending indices: at most 3 per bin, the first and the last point; all points if there are few.
    """
    count = len(values)
    if count <= 2 * bins:
        return np.arange(count)
    size = -(-count // bins)
    starts = np.arange(0, count, size)
    padded = np.full(len(starts) * size, np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    rows = padded.reshape(-1, size)  # [bin, point]
    missing = np.isnan(rows)
    known, none = ~missing.all(axis=1), ~np.isfinite(values)
    smallest = starts + np.where(missing, np.inf, rows).argmin(axis=1)
    largest = starts + np.where(missing, -np.inf, rows).argmax(axis=1)
    gaps = np.unique(np.flatnonzero(none) // size, return_index=True)[1]
    return np.unique(np.concatenate([smallest[known], largest[known], np.flatnonzero(none)[gaps], [0, count - 1]]))


def _ascending(column: Column) -> tuple[Column, int]:
    """Return the column sorted by step, with the last value of each step, and the number of descending steps."""
    steps, values = column.steps, column.values
    ahead = np.diff(steps)
    if (ahead > 0).all():
        return column, 0
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(np.diff(steps) > 0, True)
    return Column(steps[last], values[last]), int((ahead < 0).sum())


def _content(path: StoragePath) -> bytes:
    """Return the bytes of a file or an object; no bytes if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


_TAIL_BYTES = 1 << 18  # first read; more follows until the last step and the last evaluation are found
_MAX_TAIL_BYTES = 1 << 24
_OF_A_RUN = {RunPaths.starts, RunPaths.metrics, RunPaths.checkpoints, RunPaths.huggingface, RunPaths.lock}


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
    bytes_sent: float | None = None  # by a device over `replica`, or over the network since the last start
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
    if RunPaths.config in here and _OF_A_RUN & set(here):
        return [summary_of(RunPaths(folder))]
    found = parallel_map(lambda name: _summary_in(folder / name), here)
    return [summary for summary in found if summary is not None]


def _summary_in(folder: StoragePath) -> Summary | None:
    """Return the summary of a folder; None if it is no run, or if this process may not list it."""
    try:
        here = set(names(folder))
    except PermissionError:
        return None
    is_run = _OF_A_RUN & here and (here & {RunPaths.config, RunPaths.metrics} or is_being_trained(folder))
    try:
        return summary_of(RunPaths(folder)) if is_run else None
    except OSError as error:
        return Summary(folder.name, str(folder), State.DAMAGED, f"It cannot be read: {os_error_text(error)}.")


def summary_of(run: RunPaths) -> Summary:
    is_running = is_being_trained(run.path)  # before the reads, so that a run that ends now has written its last files
    config, problem = _config(run)
    step, evaluation, damage = last_entries(run.metrics)
    saved, reason = run.saved()
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
        wanted = {name: each["bytes"] for name, each in read_manifest(folder)["files"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        return f"{folder / MANIFEST} cannot be read, so the checkpoint of step {noted} cannot."
    sizes = {name: each.size for name, each in files_below(folder).items()}
    bad = [name for name, size in wanted.items() if sizes.get(name) != size]
    return f"{folder}: {len(bad)} files are gone or not whole, {bad[0]} among them." if bad else None


def _is_complete(run: RunPaths, config: Entry, saved: int | None, evaluation: Entry) -> bool:
    """Return whether the last step is done, saved and evaluated; in a fleet, whether the fleet is complete."""
    steps = config.get("steps")
    if saved is None or type(steps) is not int:
        return False
    evaluates = bool(config.get("data.held_out") or config.get("evaluation.tasks"))
    evaluates = evaluates or any(key.startswith("data.validation.") for key in config)
    if evaluates and not (evaluation.get("step") == saved and is_evaluation(evaluation)):
        return False
    for key, kind in section_classes().items():
        if config.get(f"{key}.{kind.joining_key}") is not None:
            return run.metadata(saved).get(key, {}).get("complete") is True
    return saved >= steps


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
