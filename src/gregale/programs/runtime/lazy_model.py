"""Provides a run's model one parameter at a time, so that no process holds the whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from haliax import NamedArray

from gregale.axes.layout import is_named
from gregale.checkpoint.store import Checkpoints
from gregale.errors import UserError
from gregale.huggingface.folder import open_folder
from gregale.huggingface.tensor_names import parameters_of, path_of
from gregale.huggingface.weights import reader
from gregale.programs.runtime.checkpointed import evaluated_model, evaluation_template
from gregale.programs.runtime.setup import Setup
from gregale.runs.run_directory import RunDirectory
from gregale.training.state import TrainState


@dataclass(frozen=True)
class Opened:
    """A model of a run.

    - `step`: the checkpoint's step; 0 for an imported model
    - `read`: returns a parameter by its path, on the mesh of the setup
    """

    step: int
    read: Callable[[str], NamedArray]


@contextmanager
def opened(run: RunDirectory, setup: Setup, step: int | None) -> Iterator[Opened]:
    """Yield the model to evaluate of a step's checkpoint; None: the newest valid checkpoint.

    All processes of the mesh make the same calls of `read` in the same order. Raises `UserError` if there is no such
    checkpoint.
    """
    if run.is_imported:
        if step:
            raise UserError(f"{run.path} is an imported model: it has no checkpoint of step {step}.")
        yield Opened(0, reader(open_folder(Path(str(run.huggingface))), setup.model, setup.layout))
        return
    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints:
        found = checkpoints.sound_step() if step is None else step
        if found is None:
            every = setup.config.checkpoint.every
            raise UserError(f"{run.path} has no checkpoint yet; the first one comes at step {every}.")
        if step is not None:
            checkpoints.check(step)
        yield Opened(found, partial(_read, checkpoints, setup, found))


def _read(checkpoints: Checkpoints, setup: Setup, step: int, path: str) -> NamedArray:
    """Read a parameter from each tree of the checkpoint's state that has the structure of the model."""

    def template(metadata: dict) -> TrainState:
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: leaf if not is_named(leaf) or _ends_with(path_of(keys), path) else None,
            evaluation_template(setup, metadata),
            is_leaf=is_named,
        )

    restored = checkpoints.read(step, template, partial=True)
    return parameters_of(evaluated_model(setup, restored.metadata, restored.tree))[path]


def _ends_with(leaf_path: str, path: str) -> bool:
    return f".{leaf_path}".endswith(f".{path}")
