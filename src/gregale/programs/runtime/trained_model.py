"""Provides the model of a complete or running training run."""

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
    """Return the directory of the run that `run_paths.find_run` finds."""
    return RunDirectory(run_paths.find_run(name).path)


def open_trained(name: str, step: int | None, devices: int | MeshConfig | None) -> Trained:
    """Return the model of a run, from its newest valid checkpoint or that of a step; read only parameters.

    Arguments:
    - `devices`: the number of devices, or their mesh; None: the run's own mesh. An evaluation of DiLoCo's replicas
      always uses the run's mesh

    Raises `UserError` if there is no such run or checkpoint.
    """
    run = find_run(name)
    config = on_devices(run.read_config(), devices)
    start_devices(config.cpu_devices, DistributedConfig())
    setup = set_up_run(run, config)
    model, step, metadata = restored_model(run, setup, step)
    return Trained(run, setup, model, step, metadata)


def on_devices(config: TrainConfig, devices: int | MeshConfig | None) -> TrainConfig:
    """Return a run's configuration with its model on `devices`, see `open_trained`."""
    if devices is None or config.sync.evaluates_replicas:
        return config
    mesh = MeshConfig(data=devices) if isinstance(devices, int) else devices
    cpu_devices = mesh.device_count if config.cpu_devices and mesh.device_count is not None else config.cpu_devices
    batch = replace(config.batch, microbatches=1)  # The mesh may not divide the microbatches, and no step runs.
    return replace(config, mesh=mesh, cpu_devices=cpu_devices, pipeline=None, batch=batch)


def set_up_run(run: RunDirectory, config: TrainConfig) -> Setup:
    """Return the setup of a configuration with the run's model, on the first of the started devices.

    The setup makes no step, so that it rounds the batch size up to a multiple of the devices.
    """
    keep_compiled(config.compilation_cache)
    tokens = load_tokenizer(run.path).vocabulary_size
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.device_count])
    layout = standard_layout(mesh)
    parts = config.batch.microbatches * prod(mesh.shape[axis] for axis in layout.mesh_axes((BATCH,), layout.compute))
    batch = replace(config.batch, size=-(-config.batch.size // parts) * parts)
    return set_up(replace(config, batch=batch), tokens, mesh)


def restored_model(run: RunDirectory, setup: Setup, step: int | None) -> tuple[object, int, dict]:
    """Return a run's model on the mesh of a setup, its step, and the checkpoint's metadata.

    - `setup`: has the run's model and method
    - `step`: None: the step of the newest valid checkpoint; 0 for an imported model

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
