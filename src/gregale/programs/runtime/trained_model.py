"""Provides the model of a complete or running training run, whole or one parameter at a time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
from haliax import NamedArray

from gregale.axes.layout import BATCH, is_named
from gregale.axes.mapping import MappingConfig, mapped_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.checkpoint.store import Checkpoints
from gregale.data.tokenizers import SAVED_NAME, load_tokenizer
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices
from gregale.errors import UserError
from gregale.huggingface.folder import BESIDE, WEIGHTS, check_files, open_folder
from gregale.huggingface.tensor_names import parameters_of, path_of
from gregale.huggingface.weights import read_model, reader
from gregale.inference.generate import multiple_of
from gregale.programs.runtime.checkpointed import evaluated_model, evaluation_template
from gregale.programs.runtime.setup import Setup, set_up
from gregale.runs import run_paths
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.training.compilation_cache import keep_compiled
from gregale.training.state import TrainState


@dataclass(frozen=True)
class Trained:
    run: RunDirectory
    setup: Setup
    model: object
    step: int
    metadata: dict


def find_run(name: str) -> RunDirectory:
    """Return the named run; raise `UserError` if there is none, or if a file of its model is a link out of it."""
    run = RunDirectory(run_paths.find_run(name).path)
    check_files(run.path, (SAVED_NAME, *(f"{run.huggingface.name}/{file}" for file in (*BESIDE, WEIGHTS))))
    return run


def open_trained(name: str, step: int | None, devices: int | MeshConfig | None) -> Trained:
    """Return the model of a run, from its newest valid checkpoint or that of a step; read only parameters.

    - `devices`: the number of devices, or their mesh; None: the run's own mesh. An evaluation of DiLoCo's replicas
      always uses the run's mesh

    Raises `UserError` if there is no such run or checkpoint.
    """
    run = find_run(name)
    config = on_devices(run.config_at(step), devices)
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
    # No step and no evaluation of the run's own text runs: the mesh may not divide microbatches and lengths.
    batch, evaluation = replace(config.batch, microbatches=1), replace(config.evaluation, sequence_lengths=[])
    devices_of = {"mesh": mesh, "mapping": MappingConfig(), "cpu_devices": cpu_devices}
    return replace(config, **devices_of, pipeline=None, batch=batch, evaluation=evaluation)


def set_up_run(run: RunDirectory, config: TrainConfig) -> Setup:
    """Return the setup of a configuration with the run's model, on the first of the started devices.

    The setup makes no step, so that it rounds the size and the length of the batch up to multiples of the devices.
    """
    keep_compiled(config.compilation_cache)
    tokens = load_tokenizer(run.path).vocabulary_size
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.device_count])
    layout = mapped_layout(mesh, config.mapping)
    batch = config.batch
    parts = batch.microbatches * layout.devices((BATCH,), layout.compute)
    chunks = 2 * layout.context if layout.context > 1 else 1
    rounded = {"size": multiple_of(parts, batch.size), "sequence_length": multiple_of(chunks, batch.sequence_length)}
    return set_up(replace(config, batch=replace(batch, **rounded)), tokens, mesh)


def restored_model(run: RunDirectory, setup: Setup, step: int | None) -> tuple[object, int, dict]:
    """Return a run's model on the mesh of a setup, its step, and the checkpoint's metadata.

    - `setup`: has the run's model and method
    - `step`: None: the step of the newest valid checkpoint; 0 for an imported model

    Raises `UserError` if there is no such checkpoint.
    """
    if run.is_imported:
        refuse_step(run, step)
        return read_model(open_folder(Path(str(run.huggingface))), setup.model, setup.layout), 0, {}

    def template(metadata: dict) -> TrainState:
        return evaluation_template(setup, metadata)

    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints:
        if step is None:
            restored = checkpoints.latest(template, partial=True)
        else:
            restored = checkpoints.restore(step, template, partial=True)
    if restored is None:
        raise no_checkpoint(run, setup)
    return evaluated_model(setup, restored.metadata, restored.tree), restored.step, restored.metadata


def refuse_step(run: RunDirectory, step: int | None) -> None:
    if step:
        raise UserError(f"{run.path} is an imported model: it has no checkpoint of step {step}.")


def no_checkpoint(run: RunDirectory, setup: Setup) -> UserError:
    every = setup.config.checkpoint.every
    return UserError(f"{run.path} has no checkpoint yet; the first one comes at step {every}.")


# The model one parameter at a time, so that no process holds the whole model.


@dataclass(frozen=True)
class Opened:
    """A model of a run."""

    step: int  # the checkpoint's step; 0 for an imported model
    read: Callable[[str], NamedArray]  # returns a parameter by its path, on the mesh of the setup


@contextmanager
def opened(run: RunDirectory, setup: Setup, step: int | None) -> Iterator[Opened]:
    """Yield the model to evaluate of a step's checkpoint; None: the newest valid checkpoint.

    All processes of the mesh make the same calls of `read` in the same order. Raises `UserError` if there is no such
    checkpoint.
    """
    if run.is_imported:
        refuse_step(run, step)
        yield Opened(0, reader(open_folder(Path(str(run.huggingface))), setup.model, setup.layout))
        return
    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints:
        found = checkpoints.sound_step() if step is None else step
        if found is None:
            raise no_checkpoint(run, setup)
        if step is not None:
            checkpoints.check(step)
        yield Opened(found, partial(_read, checkpoints, setup, found))


def _read(checkpoints: Checkpoints, setup: Setup, step: int, path: str) -> NamedArray:
    """Read a parameter from each tree of the checkpoint's state that has the structure of the model."""

    def template(metadata: dict) -> TrainState:
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: leaf if not is_named(leaf) or f".{path_of(keys)}".endswith(f".{path}") else None,
            evaluation_template(setup, metadata),
            is_leaf=is_named,
        )

    restored = checkpoints.read(step, template, partial=True)
    return parameters_of(evaluated_model(setup, restored.metadata, restored.tree))[path]
