"""The paths of a run's files. This module does not import JAX, so that programs that only read start fast."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gregale.errors import UserError
from gregale.storage import StoragePath, is_url, storage_path


@dataclass(frozen=True)
class RunPaths:
    path: StoragePath

    @property
    def config(self) -> StoragePath:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> StoragePath:
        return self.path / "checkpoints"

    @property
    def huggingface(self) -> StoragePath:
        """The files of an imported model, or those of the imported model from which the run started."""
        return self.path / "huggingface"

    @property
    def is_imported(self) -> bool:
        """Whether `gregale import` created the directory, which then has a model and no checkpoints."""
        return isinstance(folder := self.huggingface, Path) and any(folder.glob("*.safetensors"))

    @property
    def samples(self) -> StoragePath:
        return self.path / "samples.txt"

    @property
    def metrics(self) -> StoragePath:
        return self.path / "metrics.jsonl"

    @property
    def changes(self) -> StoragePath:
        """A file with one line for each resume with a changed configuration."""
        return self.path / "changes.jsonl"

    @property
    def starts(self) -> StoragePath:
        """A file with one line for each start or resume, with devices and compiler options."""
        return self.path / "starts.jsonl"

    @property
    def stalled(self) -> StoragePath:
        """The message of an island while no round is committed; empty or absent otherwise."""
        return self.path / "island.stalled"

    @property
    def newest_checkpoint(self) -> StoragePath:
        """A file with the step of the newest checkpoint, and the reason of a callback that ended the run there."""
        return self.path / "newest_checkpoint.json"

    def stop_reason(self, step: int | None) -> str | None:
        """Return the reason of the callback that ended the run after this step; None if none did."""
        try:
            record = json.loads(self.newest_checkpoint.read_bytes())
            return str(record["stop_reason"]) if record["step"] == step else None
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def recorded_checkpoint(self) -> int | None:
        """Return the step of the newest committed checkpoint, even if it is gone; None before the first."""
        try:
            return int(json.loads(self.newest_checkpoint.read_bytes())["step"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


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
    states = {True: "has no config.yaml", False: "does not exist"}
    found = " and ".join(f"{path} {states[os.path.exists(path)]}" for path in paths)
    known = sorted(config.parent.name for config in Path("runs").glob("*/config.yaml"))
    hint = f"The runs here are {', '.join(known)}." if known else "`gregale train` makes one."
    raise UserError(f"{name} is not a run directory: {found}. {hint}")


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl has the result of an evaluation, of text or of tasks alone."""
    if "eval_loss" in line:
        return line["eval_loss"] is not None
    return any(value is not None for name, value in line.items() if name.startswith("acc."))
