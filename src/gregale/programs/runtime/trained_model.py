"""Opening the model of a finished or running training run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import jax

from gregale.axes.layout import BATCH, standard_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.checkpoint.store import Checkpoints
from gregale.data.tokenizers import load_tokenizer
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices
from gregale.errors import UserError
from gregale.huggingface.folder import open_folder
from gregale.huggingface.weights import read_model
from gregale.programs.runtime.checkpointed import evaluated_model, evaluation_template
from gregale.programs.runtime.setup import Setup, set_up
from gregale.runs import run_paths
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.training.compilation_cache import keep_compiled
from gregale.training.state import TrainState


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint."""

    run: RunDirectory
    setup: Setup
    model: object
    step: int
    metadata: dict


def find_run(name: str) -> RunDirectory:
    """As `run_paths.find_run`, with what is read and written there."""
    return RunDirectory(run_paths.find_run(name).path)


def open_trained(name: str, step: int | None, devices: int | MeshConfig | None) -> Trained:
    """The model of a run, from its newest sound checkpoint or from that of a step; only parameters are read.

    Arguments:
    - `devices`: how many devices to hold it on, or their mesh; None: the run's own mesh, which the replicas of DiLoCo
      need anyway, where it is theirs that are evaluated

    Raises `UserError` if there is no such run or checkpoint.
    """
    run = find_run(name)
    config = on_devices(run.read_config(), devices)
    start_devices(config.cpu_devices, DistributedConfig())
    setup = set_up_run(run, config)
    model, step, metadata = restored_model(run, setup, step)
    return Trained(run, setup, model, step, metadata)


def on_devices(config: TrainConfig, devices: int | MeshConfig | None) -> TrainConfig:
    """A run's configuration with its model on so many devices, as `open_trained` says."""
    if devices is None or config.sync.evaluates_replicas:
        return config
    mesh = MeshConfig(data=devices) if isinstance(devices, int) else devices
    cpu_devices = mesh.device_count if config.cpu_devices and mesh.device_count is not None else config.cpu_devices
    batch = replace(config.batch, microbatches=1)  # which this mesh might not divide; no step is made
    return replace(config, mesh=mesh, cpu_devices=cpu_devices, pipeline=None, batch=batch)


def set_up_run(run: RunDirectory, config: TrainConfig) -> Setup:
    """What a run's configuration, or another with its model, becomes on the first of the devices that were started.

    No step is made, so that a batch is filled up to as many sequences as these devices divide.
    """
    keep_compiled(config.compilation_cache)
    tokens = load_tokenizer(run.path).vocabulary_size
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.device_count])
    layout = standard_layout(mesh)
    parts = config.batch.microbatches * prod(mesh.shape[axis] for axis in layout.mesh_axes((BATCH,), layout.compute))
    batch = replace(config.batch, size=-(-config.batch.size // parts) * parts)
    return set_up(replace(config, batch=batch), tokens, mesh)


def restored_model(run: RunDirectory, setup: Setup, step: int | None) -> tuple[object, int, dict]:
    """A run's model on the mesh of a set-up, the step that it is of, and what is noted beside it.

    - `setup`: with the run's model and method
    - `step`: None: that of the newest sound checkpoint; of an imported model, 0

    Raises `UserError` if there is no such checkpoint.
    """
    if run.is_imported:
        if step:
            raise UserError(f"{run.path} is an imported model: it has no checkpoint of step {step}.")
        return read_model(open_folder(Path(str(run.huggingface))), setup.model, setup.layout), 0, {}

    def template(metadata: dict) -> TrainState:
        return evaluation_template(setup, metadata)

    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints:
        if step is None:
            restored = checkpoints.latest(template, partial=True)
        else:
            restored = checkpoints.restore(step, template, partial=True)
    if restored is None:
        every = setup.config.checkpoint.every
        raise UserError(f"{run.path} has no checkpoint yet; the first one comes at step {every}.")
    return evaluated_model(setup, restored.metadata, restored.tree), restored.step, restored.metadata
