"""A run's model that is read one parameter at a time, so that it is never whole anywhere."""

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

    - `step`: of its checkpoint; of an imported model, 0
    - `read`: gives a parameter by its path, on the mesh of the set-up
    """

    step: int
    read: Callable[[str], NamedArray]


@contextmanager
def opened(run: RunDirectory, setup: Setup, step: int | None) -> Iterator[Opened]:
    """The model that is evaluated of a step's checkpoint; None: of the newest sound one.

    Every process of the mesh makes the same calls of `read` in the same order. Raises `UserError` if there is no such
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
    """What the checkpoint has of a parameter: in every tree of the state that is shaped like the model."""

    def template(metadata: dict) -> TrainState:
        return jax.tree_util.tree_map_with_path(
            lambda place, leaf: leaf if not is_named(leaf) or _ends_with(path_of(place), path) else None,
            evaluation_template(setup, metadata),
            is_leaf=is_named,
        )

    restored = checkpoints.read(step, template, partial=True)
    return parameters_of(evaluated_model(setup, restored.metadata, restored.tree))[path]


def _ends_with(place: str, path: str) -> bool:
    return f".{place}".endswith(f".{path}")
