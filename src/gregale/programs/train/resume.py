"""Provides the first state of a run: a new one, that of a model, or that of the newest checkpoint of any method."""

from dataclasses import replace
from typing import NamedTuple

import jax

from gregale.checkpoint.store import Checkpoints, Restored
from gregale.data.mixtures import Mixtures, sources_of, with_mixture
from gregale.data.preparation import Corpus
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import copy_beside
from gregale.methods.method import Method
from gregale.programs.plan.estimates import tree_bytes
from gregale.programs.runtime.expert_parallelism import set_up
from gregale.programs.runtime.memory import check_fits
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import (
    Base,
    as_here,
    checkpoint_template,
    continued,
    find_origin,
    holds_more,
    mixtures_of,
    newer_masks,
    recorded,
    restored_model,
    saved_by,
    weights_of,
)
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.training.state import TrainState, abstract_state, new_train_state, state_shardings

ROTARY_SCALING, PARAMETRISATION = "rotary_scaling", "parametrisation"


class Start(NamedTuple):
    """The point at which a run starts or resumes."""

    state: TrainState  # of the method that makes the next step
    step: int  # steps done
    replica_bytes: int  # bytes that a device has sent over `replica` in those steps
    examples: int  # examples of those steps
    mixtures: Mixtures = ()  # of the sources, so far and from this point on
    base: Base | None = None  # the origin of frozen weights, for the checkpoints
    unfinished: bool = False  # a stop has left out callbacks of the last step, see `Steps.unfinished`


def starting_point(
    setup: Setup, before: TrainConfig | None, checkpoints: Checkpoints, step: int | None, corpus: Corpus
) -> Start:
    """Return the state to start from, and the run's counts so far.

    Arguments:
    - `before`: the configuration of the checkpoint; its `sync` and `reduce` determine the contents of the checkpoint
    - `step`: of the intact checkpoint to start from; None: there is none

    Raises `UserError` if the state needs more memory than is free, if the checkpoint does not fit the data or the mesh,
    or is of another version.
    """
    held = tree_bytes(setup).state
    check_fits(setup, "the state (parameters and what the optimizer keeps of them)", held)
    mixture = setup.config.mixture
    if step is None:
        mixtures, base = with_mixture((), 0, *mixture), None
        setup.config.sync.check_begins(0)
        if setup.config.start_from is None:
            return Start(setup.initial_state(), 0, 0, 0, mixtures)
        if setup.frozen is not None:
            base = Base.of(setup.config)
        return Start(started_state(setup, corpus.tokenizer, base), 0, 0, 0, mixtures, base)
    saved = setup
    if before is not None and (before.sync, before.reduce) != (setup.config.sync, setup.config.reduce):
        as_before = replace(setup.config, sync=before.sync, reduce=before.reduce)
        saved = set_up(as_before, setup.tokens, setup.layout.mesh)
    restored = checkpoints.read(
        step,
        lambda metadata: checkpoint_template(saved, metadata),
        partial=lambda metadata: holds_more(saved, metadata),
    )
    mixtures = mixtures_of(restored.metadata, before or setup.config)
    check_text(restored, mixtures, corpus)
    state, base = restored.tree, None
    if setup.frozen is not None:
        base = Base.recorded(setup, restored.metadata)
        state = state._replace(frozen=weights_of(base, setup, setup.frozen))
    state = converted(setup, state, step, saved_by(saved, restored.metadata))
    if state.spikes is None and setup.config.skip_spikes is not None:
        state = state._replace(spikes=setup.new_spikes(step))
    sent, examples = (recorded(restored.metadata, name) for name in ("replica_bytes", "examples"))
    unfinished = restored.metadata.get("unfinished", False)
    return Start(state, step, sent, examples, with_mixture(mixtures, examples, *mixture), base, unfinished)


def check_text(restored: Restored, mixtures: Mixtures, corpus: Corpus) -> None:
    """Raise `UserError` if the sources of a checkpoint are absent, or have other text."""
    absent = [name for name in sources_of(mixtures) if name not in corpus.train_rows]
    if absent:
        raise UserError(
            f"data.sources: {absent[0]} is missing, on which this run was trained until step {restored.step}. Put it "
            "back; with `weight: 0` it is not drawn from any more."
        )
    if recorded(restored.metadata, "data") != corpus.fingerprint_after(mixtures):
        if newer := newer_masks(restored.metadata, corpus):
            raise UserError(
                f"data: {newer}. Start another run with --fresh; or with a new name and `--start_from RUN`, so that it "
                "begins with the weights of this one."
            )
        raise UserError(
            f"data: the text is not the one that this run was trained on until step {restored.step}: a source or the "
            f"tokenizer has changed. Put the old text back, or start another run with a new name or with --fresh."
        )


def converted(setup: Setup, state: TrainState, step: int, method: Method) -> TrainState:
    """Return the state converted for the method that makes the step after `step` steps.

    Errors of quantised averages start from zero if the state has none, or has other ones than the method.

    - `method`: the method that made the state
    """
    coming = setup.method_after(step)
    if coming is not method:
        setup.config.sync.check_begins(step)
        return _moved(setup, coming, lambda state: coming.from_psdp(method.to_psdp(state), step), state)
    wanted = abstract_state(coming, setup.model).method
    if jax.tree.structure(state.method) != jax.tree.structure(wanted):
        return _moved(setup, coming, coming.reset_error, state)
    return state


def _moved(setup: Setup, method: Method, change, state: TrainState) -> TrainState:
    shardings = state_shardings(method, abstract_state(method, setup.model)._replace(frozen=None))
    options = setup.compiler_options
    move = jax.jit(
        lambda inner: new_train_state(method, change(inner), 0), out_shardings=shardings, compiler_options=options
    )
    return move(state.method)._replace(step=state.step, frozen=state.frozen)


def origin_of(config: TrainConfig) -> RunDirectory:
    """Return the run, or the imported model, that a configuration starts from.

    Raises `UserError` if there is none, or if its model has another shape.
    """
    origin = find_origin(config)
    theirs = origin.config_at()
    if theirs.sync.evaluates_replicas:
        raise UserError(
            f"start_from: {origin.path} evaluates its replicas, each with parameters of its own, so that it has no one "
            "model to start from."
        )
    found = [change for change in changes(theirs.model, config.model, "model") if change.fixed]
    found = [change for change in found if not change.key.startswith(f"model.{PARAMETRISATION}")]  # of rates alone
    if config.model.rotary_scaling is not None:  # A longer context is trained on the same shape.
        found = [change for change in found if not change.key.startswith(f"model.{ROTARY_SCALING}")]
    if origin.is_imported:  # The reader pads its rows.
        found = [change for change in found if change.key != "model.row_multiple"]
    if found:
        raise UserError(
            f"start_from: the model of {origin.path} is of another shape: {'; '.join(map(str, found))}. Take the part "
            f"`model` of {origin.config}."
        )
    return origin


def started_state(setup: Setup, tokenizer: Tokenizer, base: Base | None = None) -> TrainState:
    """Return the state before the first step, with the parameters of the newest checkpoint of `start_from`.

    Adapters that it has are merged into its weights.

    - `base`: the weights to freeze, if there are any: those beside adapters, or a copy

    Raises `UserError` if the tokenizers differ.
    """
    config = setup.config
    origin = origin_of(config)
    theirs = origin.config_at()
    if load_tokenizer(origin.path).parsing_special().fingerprint != tokenizer.parsing_special().fingerprint:
        raise UserError(
            f"start_from: the model of {origin.path} was trained on the tokens of another tokenizer. Take the part "
            f"`data.tokenizer` of {origin.config}."
        )
    if base is not None:
        return setup.state_from(weights_of(base, setup, setup.stored_base), continued(setup, base))
    if theirs.adapter is not None:
        return setup.state_from(weights_of(Base.of(config), setup, setup.stored_base))
    here = as_here(theirs, config)
    model, _, _ = restored_model(origin, set_up(here, tokenizer.vocabulary_size, setup.layout.mesh), None)
    return setup.state_from(model)


def keep_what_came_with(origin: RunDirectory, run: RunDirectory) -> None:
    """Copy the files beside an imported model's weights, so that `gregale export` can write them again."""
    if origin.huggingface.is_dir():
        run.huggingface.mkdir(exist_ok=True)
        copy_beside(origin.huggingface, run.huggingface)
