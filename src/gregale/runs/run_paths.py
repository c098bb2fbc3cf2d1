"""What a run's directory has, by name; to be imported without JAX by whoever only looks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gregale.errors import UserError
from gregale.runs.run_lock import LOCK
from gregale.storage import StoragePath, is_url, storage_path


@dataclass(frozen=True)
class RunPaths:
    """The places of one run."""

    path: StoragePath

    @property
    def config(self) -> StoragePath:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> StoragePath:
        return self.path / "checkpoints"

    @property
    def huggingface(self) -> StoragePath:
        """An imported model as it came, or what came with the one that the run started from."""
        return self.path / "huggingface"

    @property
    def is_imported(self) -> bool:
        """Whether `gregale import` made it: it holds a model, and no checkpoints."""
        return isinstance(folder := self.huggingface, Path) and any(folder.glob("*.safetensors"))

    @property
    def samples(self) -> StoragePath:
        return self.path / "samples.txt"

    @property
    def metrics(self) -> StoragePath:
        return self.path / "metrics.jsonl"

    @property
    def changes(self) -> StoragePath:
        """A line for each time that the run went on with another configuration."""
        return self.path / "changes.jsonl"

    @property
    def starts(self) -> StoragePath:
        """A line for each time that the run began or went on: on which devices, with which compiler options."""
        return self.path / "starts.jsonl"

    @property
    def stalled(self) -> StoragePath:
        """What an island says while no round is committed; empty or missing while they are."""
        return self.path / "island.stalled"

    @property
    def lock(self) -> StoragePath:
        """Who trains the run, see `run_lock`."""
        return self.path / LOCK

    @property
    def newest_checkpoint(self) -> StoragePath:
        """Notes the step of the newest checkpoint, so that a run whose checkpoints are gone is not taken for new."""
        return self.path / "newest_checkpoint.json"

    def recorded_checkpoint(self) -> int | None:
        """The step of the newest checkpoint that was ever committed and not replaced; None before the first."""
        try:
            return int(json.loads(self.newest_checkpoint.read_bytes())["step"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def find_run(name: str) -> RunPaths:
    """The run directory by its URL, by its path, or by its name under runs/: whichever of the two is a run.

    A name with a `/` in it is a path first. Raises `UserError` if neither is a run, or both are and the name is bare.
    """
    if is_url(name):
        run = RunPaths(storage_path(name))
        if not run.config.is_file():
            raise UserError(f"{name} is not a run directory: there is no object {run.config}.")
        return run
    places = list(dict.fromkeys([Path(name), Path("runs") / name]))
    runs = [path for path in places if os.path.isfile(str(RunPaths(path).config))]  # False for any impossible path
    if len(runs) == 2 and "/" not in name:
        raise UserError(f"{name} could be ./{runs[0]} or {runs[1]}: both are run directories; give one as a path.")
    if runs:
        return RunPaths(runs[0])
    states = {True: "has no config.yaml", False: "does not exist"}
    found = " and ".join(f"{place} {states[os.path.exists(place)]}" for place in places)
    known = sorted(config.parent.name for config in Path("runs").glob("*/config.yaml"))
    hint = f"The runs here are {', '.join(known)}." if known else "`gregale train` makes one."
    raise UserError(f"{name} is not a run directory: {found}. {hint}")


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has an evaluation, of text or of tasks alone, that was a number."""
    if "eval_loss" in line:
        return line["eval_loss"] is not None
    return any(value is not None for name, value in line.items() if name.startswith("acc."))
