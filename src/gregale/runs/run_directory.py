"""The directory of a run, on a disk or in an object store: configuration, checkpoints, metrics and samples."""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from gregale.checkpoint.manifest import MANIFEST, committed_steps, folder_name
from gregale.codecs.codec import ReduceConfig
from gregale.errors import UserError
from gregale.methods.config import SyncConfig
from gregale.runs.config import TrainConfig
from gregale.runs.history import RunPaths, is_evaluation
from gregale.runs.parsing import decoded, dump, load
from gregale.runs.stages import Change, changes
from gregale.storage import ObjectPath, RetryPolicy, StoragePath, StoreError, parallel_map, write_bytes
from gregale.storage.jsonl import Entries, read_entries
from gregale.version import __version__

_SHORT_RETRIES = RetryPolicy(seconds=5.0, silence_seconds=5.0)

LONGEST_COMMAND, GIT_SECONDS = 2000, 5.0
_SAMPLE = re.compile(rb"^--- step (\d+)$", re.MULTILINE)


class RunDirectory(RunPaths):
    """The paths of one run, with methods that read and write its files."""

    def has_evaluation(self, step: int) -> bool:
        """Return whether metrics.jsonl has a complete evaluation of a step with a number."""
        return any(line["step"] == step and is_evaluation(line) for line in self.figures().entries)

    def figures(self) -> Entries:
        """Return the lines of metrics.jsonl, and a sentence about damaged lines."""
        return read_entries(self.metrics, number="step")

    def note_checkpoint(self, step: int, stop_reason: str | None = None) -> None:
        """Write the step of the newest checkpoint, and the reason of the callback that ended the run there."""
        record = {"step": step} if stop_reason is None else {"step": step, "stop_reason": stop_reason}
        write_bytes(self.newest_checkpoint, json.dumps(record).encode())

    def resume_hint(self) -> str:
        """Return a sentence about the checkpoint from which the same command would resume."""
        folder = self.checkpoints
        if isinstance(folder, ObjectPath):  # the process is about to end and must not wait for a store
            folder = replace(folder, retry_policy=_SHORT_RETRIES)
        try:
            steps = committed_steps(folder)
        except StoreError:
            return "The same command goes on from the newest checkpoint."
        if not steps:
            return "There is no checkpoint yet; the same command begins anew."
        return f"The newest checkpoint is that of step {steps[-1]}; the same command goes on from there."

    def check_checkpoints(self, steps: list[int]) -> str | None:
        """Compare the steps of the existing checkpoints with the newest committed step.

        Returns a warning if newer checkpoints are gone. Raises `UserError` if all are gone, because a new start would
        delete the run's files.
        """
        noted = self.saved().step
        if noted is None or noted in steps:
            return None
        if not steps:
            last = max((line["step"] for line in self.figures().entries), default=noted)
            raise UserError(
                f"{self.checkpoints} has no checkpoint any more, but this run has saved one at step {noted}. To start "
                f"at step 0 again would delete the metrics and samples of its {last} steps. Put a checkpoint back, or "
                f"give --fresh, which sets the old run aside and begins anew."
            )
        newest = steps[-1]
        if newest > noted or (self.checkpoints / folder_name(noted)).is_dir():
            return None  # `Checkpoints.sound_step` reports a folder without a manifest
        return (
            f"The newest checkpoint, of step {noted}, is gone: going on from that of step {newest} repeats "
            f"{noted - newest} steps."
        )

    def read_config(self) -> TrainConfig:
        """Read the configuration of the run; raise `UserError` if there is no run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run directory: it has no config.yaml. `gregale train` makes one.")
        raw = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        sync = with_older_defaults(raw.get("sync") if isinstance(raw, Mapping) else None)
        return load(TrainConfig, {**raw, "sync": sync} if sync else self.config)

    def config_at(self, step: int | None = None) -> TrainConfig:
        """Return the configuration of the stage that made the checkpoint of a step.

        A run that resumes writes its configuration at once. Until its next checkpoint, the newest one may be of another
        `sync` and `reduce`, which decide about the arrays in it: its metadata has them.

        - `step`: None: that of the newest checkpoint
        """
        step = (self.newest_step() if step is None else step) or 0
        config, made_by = self._at(self.read_config(), step), self.metadata(step).get("made_by", {})
        if not made_by:
            return config
        sync = decoded(SyncConfig, with_older_defaults(made_by["sync"]) or made_by["sync"])
        reduce = decoded(ReduceConfig, made_by["reduce"])
        same = (config.sync, config.reduce) == (sync, reduce)
        return config if same else replace(config, sync=sync, reduce=reduce)

    def _at(self, config: TrainConfig, step: int) -> TrainConfig:
        """Return the configuration of a checkpoint's stage: that of its step, or the one that a section recorded."""
        metadata = self.metadata(step)
        number = next((each["stage"] for key in config.sections if "stage" in (each := metadata.get(key, {}))), None)
        return config.at(step) if number is None else config.each_stage[min(number, len(config.stages))].config

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, intact or not; None if nothing is saved."""
        recorded = self.saved().step
        return max(committed_steps(self.checkpoints), default=None) if recorded is None else recorded

    def saved_config(self, step: int | None = None) -> TrainConfig | None:
        """Return `config_at(step)`; None if nothing is saved."""
        return None if not self.config.is_file() or self.newest_step() is None else self.config_at(step)

    def check_compatible(self, config: TrainConfig) -> None:
        """Raise `UserError` for an imported model, or with the changed keys if the run cannot resume with `config`."""
        if self.is_imported:
            raise UserError(
                f"{self.path} is an imported model, not a run. To train it, give the run another `name`, and "
                f"`--start_from {self.path}`."
            )
        if (saved := self.saved_config()) is None:
            return
        now = self._at(config, self.newest_step() or 0)
        if fixed := [change for change in changes(saved, now) if change.fixed]:
            found = "; ".join(f"{change} ({change.fixed.why})" for change in fixed if change.fixed)
            raise UserError(
                f"{self.path} holds a run that cannot go on with this configuration: {found}. To go on with it, "
                f"restore these keys, others may change; to start a new run, change `name`, or give --fresh, which "
                f"sets the old run aside."
            )

    def write_samples(self, step: int, texts: list[str]) -> None:
        """Append the samples of a step to samples.txt, atomically.

        Samples of this step and of later steps are removed: a killed process wrote them, and the steps are repeated.
        """
        before = self.samples.read_bytes() if self.samples.is_file() else b""
        superseded = (match.start() for match in _SAMPLE.finditer(before) if int(match[1]) >= step)
        kept = before[: next(superseded, len(before))]
        after = kept + "".join(f"--- step {step}\n{text}\n" for text in texts).encode()
        if after != before:
            write_bytes(self.samples, after)

    def record_changes(self, step: int, changed: Sequence[Change]) -> None:
        """Append a line with a step and the changed keys to changes.jsonl, if there are changes."""
        if not changed:
            return
        self._add(self.changes, step, {"changes": {change.key: [change.before, change.now] for change in changed}})

    def record_start(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Append a line to starts.jsonl with metadata about a start after a step, and where it was given how."""
        self._add(self.starts, step, {**metadata, **origin_of_start()})

    def _add(self, path: StoragePath, step: int, metadata: Mapping[str, Any]) -> None:
        """Append a line to a file, atomically."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"step": step, "time": time, "gregale": __version__, **metadata}
        before = path.read_bytes() if path.is_file() else b""
        end = b"" if before.endswith(b"\n") or not before else b"\n"  # an editor may have removed it
        write_bytes(path, before + end + json.dumps(entry).encode() + b"\n")

    def write_config(self, config: TrainConfig) -> None:
        """Write config.yaml, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_bytes(self.config, dump(config).encode())

    def archive(self) -> StoragePath | None:
        """Rename an existing run directory to the first free `<name>.old-<n>`; return the new path."""
        if not self.path.exists():
            return None
        path, names = self.path, (f"{self.path.name}.old-{number}" for number in count(1))
        name = next(name for name in names if not path.with_name(name).exists())
        if isinstance(path, ObjectPath):
            _move(path, path.with_name(name))
        else:
            path.rename(path.with_name(name))
            RunPaths(path.with_name(name)).lock.unlink(missing_ok=True)
        return path.with_name(name)


def _move(folder: ObjectPath, to: ObjectPath) -> None:
    """Copy all objects of a run except its lock inside the store, then delete them: a store cannot rename.

    A process that is killed before the last copy leaves the run unchanged; the next command uses the next free name. A
    process that is killed later leaves a complete copy, and the same command archives the rest of the run.
    """
    names = [name for name in folder.files_below() if name != RunPaths.lock]
    parallel_map(lambda name: (folder / name).copy_to(to / name), names)
    for is_manifest in (True, False):  # manifests first, so that no incomplete checkpoint is valid
        group = [name for name in names if name.endswith(MANIFEST) is is_manifest]
        parallel_map(lambda name: (folder / name).unlink(missing_ok=True), group)


def with_older_defaults(sync: Any) -> Any:
    """Return a recorded `sync` of code before `momentum_warmup`, which had none; None if it is of later code."""
    outer = sync.get("outer") if isinstance(sync, Mapping) else None
    if not isinstance(outer, Mapping) or "momentum_warmup" in outer or outer.get("type", "sgd") != "sgd":
        return None
    return {**sync, "outer": {**outer, "momentum_warmup": 0}}


def origin_of_start() -> dict[str, str]:
    """Return the command of this process, the name of its host, and the commit of the working folder, if it has one."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    found = {"command": command[:LONGEST_COMMAND], "host": platform.node()}
    with suppress(OSError, subprocess.SubprocessError):
        describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        told = subprocess.run(describe, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
        found["commit"] = told.stdout.strip()
    return found
