"""Provides the initial parameters of a new run with `start_from`."""

from __future__ import annotations

import os
from dataclasses import replace

from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import CONFIG, copy_beside
from gregale.programs.runtime.setup import Setup, set_up
from gregale.programs.runtime.trained_model import find_run, restored_model
from gregale.runs.config import TrainConfig
from gregale.runs.config_diff import changes
from gregale.runs.run_directory import RunDirectory
from gregale.training.state import TrainState


def origin_of(config: TrainConfig) -> RunDirectory:
    """Return the run, or the imported model, that a configuration starts from.

    Raises `UserError` if there is none, or if its model has another shape.
    """
    assert config.start_from is not None
    if os.path.isfile(os.path.join(config.start_from, CONFIG)):
        raise UserError(
            f"start_from: {config.start_from} is a folder of the hub. `gregale import {config.start_from} NAME` makes "
            "a model to start from of it."
        )
    origin = find_run(config.start_from)
    theirs = origin.read_config()
    if theirs.sync.evaluates_replicas:
        raise UserError(
            f"start_from: {origin.path} evaluates its replicas, each with parameters of its own, so that it has no one "
            "model to start from."
        )
    found = [change for change in changes(theirs.model, config.model, "model") if change.fixed]
    if origin.is_imported:  # The reader pads its rows.
        found = [change for change in found if change.key != "model.row_multiple"]
    if found:
        raise UserError(
            f"start_from: the model of {origin.path} is of another shape: {'; '.join(map(str, found))}. Take the part "
            f"`model` of {origin.config}."
        )
    return origin


def started_state(setup: Setup, tokenizer: Tokenizer) -> TrainState:
    """Return the state before the first step, with the parameters of the newest checkpoint of `start_from`.

    Raises `UserError` if the tokenizers differ.
    """
    config = setup.config
    origin = origin_of(config)
    theirs = origin.read_config()
    if load_tokenizer(origin.path).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"start_from: the model of {origin.path} was trained on the tokens of another tokenizer. Take the part "
            f"`data.tokenizer` of {origin.config}."
        )
    own = {name: getattr(config, name) for name in ("model", "mesh", "pipeline", "batch", "compute")}
    here = replace(theirs, **own)
    model, _, _ = restored_model(origin, set_up(here, tokenizer.vocabulary_size, setup.layout.mesh), None)
    return setup.state_from(model)


def keep_what_came_with(origin: RunDirectory, run: RunDirectory) -> None:
    """Copy the files beside an imported model's weights, so that `gregale export` can write them again."""
    if origin.huggingface.is_dir():
        run.huggingface.mkdir(exist_ok=True)
        copy_beside(origin.huggingface, run.huggingface)
