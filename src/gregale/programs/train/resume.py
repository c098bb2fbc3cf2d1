"""Provides the first state of a run: a new one, that of a model, or that of the newest checkpoint of any method.

A branch of a run begins at a later stage, with the whole state of the other run.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from gregale.checkpoint.manifest import committed_steps
from gregale.checkpoint.store import Checkpoints, Restored
from gregale.data.mixtures import MixtureHistory, sources_of, with_mixture
from gregale.data.preparation import Corpus
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import copy_beside
from gregale.methods.method import Method
from gregale.model.llama import ModelConfig
from gregale.programs.plan.estimates import tree_bytes
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.memory import check_fits
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import (
    FrozenSource,
    checkpoint_template,
    continued,
    find_origin,
    holds_more,
    mixtures_of,
    newer_masks,
    on_this_mesh,
    recorded,
    restored_model,
    saved_by,
    weights_of,
)
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.storage.jsonl import read_entries
from gregale.training.state import TrainState, abstract_state, new_train_state, state_shardings

ROTARY_SCALING, PARAMETRISATION = "rotary_scaling", "parametrisation"


class Start(NamedTuple):
    """The point at which a run starts or resumes."""

    state: TrainState  # of the method that makes the next step
    step: int  # steps done
    replica_bytes: int  # bytes that a device has sent over `replica` in those steps
    examples: int  # examples of those steps
    mixtures: MixtureHistory = ()  # of the sources, so far and from this point on
    base: FrozenSource | None = None  # the origin of frozen weights, for the checkpoints
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
            base = FrozenSource.of(setup.config.start_from)
        return Start(started_state(setup, corpus.tokenizer, base), 0, 0, 0, mixtures, base)
    saved = setup
    sends = (setup.config.sync, setup.config.reduce.resolved)
    if before is not None and (before.sync, before.reduce.resolved) != sends:
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
        base = FrozenSource.recorded(setup, restored.metadata)
        state = state._replace(frozen=weights_of(base, setup, setup.frozen))
    state = converted(setup, state, step, saved_by(saved, restored.metadata))
    if state.spikes is None and setup.config.skip_spikes is not None:
        state = state._replace(spikes=setup.new_spikes(step))
    if state.average is None and setup.config.average is not None:
        state = state._replace(average=setup.new_average(step, state.method))
    sent, examples = (recorded(restored.metadata, name) for name in ("replica_bytes", "examples"))
    unfinished = restored.metadata.get("unfinished", False)
    return Start(state, step, sent, examples, with_mixture(mixtures, examples, *mixture), base, unfinished)


def check_text(restored: Restored, mixtures: MixtureHistory, corpus: Corpus) -> None:
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
    found = move(state.method)
    average = found.average if state.average is None else jax.device_put(state.average, shardings.average)
    return found._replace(step=state.step, frozen=state.frozen, average=average)


def origin_of(config: TrainConfig) -> RunDirectory:
    """Return the run, or the imported model, that a configuration starts from, see `check_origin`."""
    origin = find_origin(config.start_from)
    check_origin(origin, config.model)
    return origin


def check_origin(origin: RunDirectory, model: ModelConfig) -> None:
    """Raise `UserError` if the model of `start_from` has another shape."""
    theirs = origin.config_at()
    if theirs.sync.evaluates_replicas:
        raise UserError(
            f"start_from: {origin.path} evaluates its replicas, each with parameters of its own, so that it has no one "
            "model to start from."
        )
    found = [change for change in changes(theirs.model, model, "model") if change.fixed]
    found = [change for change in found if not change.key.startswith(f"model.{PARAMETRISATION}")]  # of rates alone
    if model.rotary_scaling is not None:  # A longer context is trained on the same shape.
        found = [change for change in found if not change.key.startswith(f"model.{ROTARY_SCALING}")]
    if origin.is_imported:  # The reader pads its rows.
        found = [change for change in found if change.key != "model.row_multiple"]
    if found:
        raise UserError(
            f"start_from: the model of {origin.path} is of another shape: {'; '.join(map(str, found))}. Take the part "
            f"`model` of {origin.config}."
        )


def started_state(setup: Setup, tokenizer: Tokenizer, base: FrozenSource | None = None) -> TrainState:
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
        return setup.state_from(weights_of(FrozenSource.of(config.start_from), setup, setup.stored_base))
    here = on_this_mesh(theirs, config)
    model, _, _ = restored_model(origin, set_up(here, tokenizer.vocabulary_size, setup.layout.mesh), None)
    return setup.state_from(model)


def keep_what_came_with(origin: RunDirectory, run: RunDirectory) -> None:
    """Copy the files beside an imported model's weights, so that `gregale export` can write them again."""
    if origin.huggingface.is_dir():
        run.huggingface.mkdir(exist_ok=True)
        copy_beside(origin.huggingface, run.huggingface)


BRANCH = "branch"  # in starts.jsonl


@dataclass(frozen=True)
class Branch:
    """The beginning of a run: the checkpoint of step `step` of the run `origin`, which is only read."""

    origin: RunDirectory
    step: int
    record: dict[str, Any]  # of the run's first start

    def opened(self) -> tuple[Checkpoints, int, TrainConfig]:
        """Return the checkpoints of the origin, for a `with` statement, the step, and its configuration."""
        checkpoints = Checkpoints(self.origin.checkpoints)
        checkpoints.check(self.step)
        return checkpoints, self.step, self.origin.config_at(self.step)


def branch_of(
    config: TrainConfig, stage: int | None, run: RunDirectory, fresh: bool, origin: RunDirectory | None
) -> Branch | None:
    """Return the beginning of a run at a stage, counted from 1; None for a run that has a checkpoint, or no `--stage`.

    Raises `UserError` if the run began in another way, or if `start_from` has no checkpoint with which it can begin.
    """
    first = {} if fresh else next(iter(read_entries(run.starts).entries), {})
    began, is_saved = first.get(BRANCH), not fresh and run.newest_step() is not None
    step = None if stage is None else _first_step(config, stage)
    if stage is None or step is None:
        if began is not None and not is_saved:
            raise UserError(
                f"{run.path} began at stage {first.get('stage')} and has no checkpoint yet. Give --stage "
                f"{first.get('stage')} again, or --fresh to begin at step 0."
            )
        if origin is not None:
            check_origin(origin, config.model)
        return None
    record = {"start_from": config.start_from, "step": step}
    if first and began != record:
        raise UserError(
            f"--stage: {run.path} is a run that did not begin after step {step:,} of {config.start_from}. Give the new "
            "run another `name`, or --fresh, which sets the old run aside. Without --stage the old run goes on."
        )
    if is_saved or origin is None:
        return None
    check_branch(origin, config, run, stage, step)
    return Branch(origin, step, {BRANCH: record})


def _first_step(config: TrainConfig, stage: int) -> int:
    """Return the number of steps before a stage, which has to be one that a run with a `start_from` can begin at."""
    count = len(config.each_stage)
    if not 2 <= stage <= count:
        later = f"2 to {count} would work" if count > 1 else "`stages` would add one"
        raise UserError(f"--stage is {stage}, but the configuration has {count} stage(s); {later}.")
    if config.start_from is None:
        raise UserError(
            f"--stage is {stage}, but start_from is not given. It names the run whose state stage {stage} begins with."
        )
    if config.adapter is not None or config.each_stage[stage - 1].config.objective.needs_reference:
        key = "objective" if config.adapter is None else "adapter"
        raise UserError(f"--stage: `{key}` freezes the model that start_from names. Leave --stage out.")
    return config.each_stage[stage - 1].first


def check_branch(origin: RunDirectory, config: TrainConfig, run: RunDirectory, stage: int, step: int) -> None:
    """Raise `UserError` if the run of `start_from` lacks a checkpoint of the step, or cannot go on with `config`."""
    if origin.path.absolute() == run.path.absolute():
        raise UserError(f"start_from: {origin.path} is this run itself. Give the branch another `name`.")
    there = committed_steps(origin.checkpoints)
    if step not in there:
        has = f"checkpoints of the steps {', '.join(f'{each:,}' for each in there)}" if there else "no checkpoint"
        raise UserError(
            f"stages.{stage - 2}.from: stage {stage} begins after step {step:,}, but {origin.path} has {has}. Begin "
            "the stage after one of these steps, or keep more of them (`checkpoint.keep_every`)."
        )
    if fixed := [change for change in changes(origin.config_at(step), config.at(step)) if change.fixed]:
        found = "; ".join(f"{change} ({change.fixed.why})" for change in fixed if change.fixed)
        raise UserError(
            f"start_from: {origin.path} cannot go on with the stages before stage {stage}: {found}. Restore these keys."
        )
