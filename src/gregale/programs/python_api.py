"""Provides `gregale.train` and `gregale.load`: training and its model for Python and notebooks."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from os import PathLike
from typing import Any

import draccus
import jax
import numpy as np

from gregale.axes.layout import MeshConfig
from gregale.data.sources.base import expand
from gregale.distributed.signals import process_goes_on
from gregale.errors import Interrupted
from gregale.huggingface.hub import resolved
from gregale.programs.loaded_model import LoadedModel
from gregale.programs.runtime.trained_model import open_trained
from gregale.programs.train.command import TrainOptions, main
from gregale.runs.config import TrainConfig
from gregale.runs.history import RunPaths, last_entries
from gregale.runs.parsing import load as read
from gregale.settings.decoding import TYPE, choice_name, is_registry
from gregale.storage import StoragePath, storage_path


@dataclass(frozen=True)
class TrainingResult:
    """The result of `gregale.train`.

    - `run`: the run directory
    - `steps`: the steps done, with those of earlier calls; the newest checkpoint has their state
    - `is_complete`: whether these are all steps, or a callback has ended the run; False after an interrupt
    - `evaluation`: the metrics of the last evaluation, such as `eval_loss`; empty without one
    """

    run: StoragePath
    steps: int
    is_complete: bool
    evaluation: dict[str, float]


def train(
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str],
    overrides: str | Sequence[str] = (),
    *,
    fresh: bool = False,
    stage: int | None = None,
    profile: str | None = None,
    **keys: Any,
) -> TrainingResult:
    """Train as `gregale train` does: with the same checks, files, resuming and output.

    Arguments:
    - `config`: the path of a YAML file, a mapping with its keys, or a `TrainConfig`
    - `overrides`: arguments of the command: `["--optimizer.learning_rate", "1e-3"]`
    - `keys`: keys of the first level, in place of those of `config`: `steps=100`; a mapping changes the keys in it
    - `fresh`, `stage`, `profile`: options of the command

    An interrupt or SIGTERM ends the call after the present step, with a checkpoint; a second interrupt raises
    KeyboardInterrupt. Before the first step of the call it ends without a checkpoint; one of several processes raises
    KeyboardInterrupt there. Outside of the main thread no signal is caught. Each process of a run of several makes this
    call.

    Raises `UserError` with the message of the command, which would end with it.
    """
    overrides = shlex.split(overrides) if isinstance(overrides, str) else overrides
    given = str(config) if isinstance(config, str | PathLike) else _plain(config)
    chosen = resolved(read(TrainConfig, given, overrides, _plain(keys)))
    with process_goes_on():
        try:
            code = main(TrainOptions(fresh=fresh, stage=stage, profile=profile), chosen)
        except Interrupted as error:
            if jax.process_count() > 1:  # the others lose this process, which has to end
                raise
            (code,) = error.args
    run = RunPaths(storage_path(expand(chosen.runs, "runs")) / chosen.name)
    _, evaluation, _ = last_entries(run.metrics)
    metrics = {name: value for name, value in evaluation.items() if name != "step"}
    return TrainingResult(run.path, run.recorded_checkpoint() or 0, code == 0, metrics)


def load(run: str | StoragePath, step: int | None = None, devices: int | MeshConfig | None = None) -> LoadedModel:
    """Return the trained model of a run, or an imported model.

    Arguments:
    - `run`: its directory or URL, or its name under runs/
    - `step`: the checkpoint's step; None: the newest valid checkpoint
    - `devices`: their number, or their mesh; None: the run's own mesh

    Raises `UserError` if there is no such run or checkpoint, or if the devices do not suffice.
    """
    return LoadedModel(open_trained(str(run), step, devices))


def _plain(value: Any) -> Any:
    """Return a value as YAML has it: mappings, lists, numbers and texts in place of Python's objects."""
    if is_dataclass(value):
        kind = {TYPE: choice_name(type(value), value)} if is_registry(type(value)) else {}
        return kind | draccus.encode(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PathLike) else value
