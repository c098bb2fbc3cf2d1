"""Where a run starts: from nothing, from its newest checkpoint, or from what another method left."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax

from gregale.axes.layout import Layout
from gregale.data.config import Corpus
from gregale.errors import UserError
from gregale.methods.config import DilocoConfig
from gregale.methods.diloco import Diloco, DilocoState, sync_axis
from gregale.methods.psdp import same
from gregale.programs.run.setup import Setup, set_up
from gregale.services.checkpoint.store import Checkpoints
from gregale.services.config import TrainConfig
from gregale.training.state import TrainState, abstract_state, state_shardings, wrapped


class Start(NamedTuple):
    """Where a run starts or goes on."""

    state: TrainState  # in the form of the method that takes the next step
    step: int  # steps done
    replica_bytes: int  # bytes that a device has sent over `replica` until then


def starting_point(setup: Setup, before: TrainConfig | None, checkpoints: Checkpoints, corpus: Corpus) -> Start:
    """The state to start from, and what the run has done until then.

    Arguments:
    - `before`: the configuration that the run had until now; its `sync` and `reduce` say what the checkpoint holds

    Raises `UserError` if the checkpoint does not fit the data or the mesh, or is of another version.
    """
    saved = setup
    if before is not None and (before.sync, before.reduce) != (setup.config.sync, setup.config.reduce):
        as_before = replace(setup.config, sync=before.sync, reduce=before.reduce)
        saved = set_up(as_before, setup.Vocab.size, setup.layout.mesh)
    restored = checkpoints.latest(
        lambda metadata: checkpoint_template(saved, metadata), partial=lambda metadata: not same_mesh(saved, metadata)
    )
    if restored is None:
        return Start(setup.initial_state(), 0, 0)
    if noted(restored.metadata, "data") != corpus.fingerprint:
        raise UserError(
            f"data: the text is not the one that this run was trained on until step {restored.step}: a source or the "
            f"tokenizer has changed. Put the old text back, or start another run with a new name or with --fresh."
        )
    state, step = restored.tree, restored.step
    if saved is not setup:
        state = parted(saved, state)
    return Start(converted(setup, state, step), step, noted(restored.metadata, "replica_bytes"))


def checkpoint_metadata(setup: Setup, corpus: Corpus, state: TrainState, replica_bytes: int) -> dict:
    """What is written beside a state, and read before it is restored."""
    method = setup.method if isinstance(state.method, DilocoState) else setup.psdp
    return {
        "data": corpus.fingerprint,
        "method": method.name,
        "replicas": joined(setup.layout),
        "mesh": dict(setup.layout.mesh.shape),
        "replica_bytes": replica_bytes,
    }


def noted(metadata: dict, key: str):
    """What a checkpoint's metadata says; raises `UserError` if a version wrote it that did not note this."""
    if key not in metadata:
        raise UserError(
            f"The checkpoint's metadata.json lacks `{key}` (it has: {', '.join(metadata) or 'nothing'}): another "
            f"version of Gregale wrote it. Use that version, or start another run with a new name or with --fresh."
        )
    return metadata[key]


def checkpoint_template(setup: Setup, metadata: dict) -> TrainState:
    """The abstract state that a checkpoint with this metadata holds.

    Errors of quantised averages are left out if they are of another mesh: they are cut as it was.
    """
    kept = same if same_mesh(setup, metadata) else without_errors
    if noted(metadata, "method") == setup.psdp.name:
        return kept(abstract_state(setup.psdp, setup.model))
    axis, replicas = sync_axis(setup.layout), joined(setup.layout)
    saved = noted(metadata, "replicas")
    if saved != replicas:
        raise UserError(
            f"mesh.{axis} is {replicas}, but the checkpoint is of DiLoCo with {saved} replicas, each "
            f"with parameters and an optimizer of its own. Resume with mesh.{axis} {saved}; to change "
            f"their number, first resume with sync.type psdp until the next checkpoint, which joins them."
        )
    return kept(setup.abstract_state())


def same_mesh(setup: Setup, metadata: dict) -> bool:
    """Whether a checkpoint was written on the mesh of this set-up."""
    return noted(metadata, "mesh") == dict(setup.layout.mesh.shape)


def without_errors(state: TrainState) -> TrainState:
    """A state without the errors of quantised averages."""
    method = state.method
    if isinstance(method, DilocoState):
        return state._replace(method=method._replace(outer=method.outer._replace(error=None)))
    return state._replace(method=method._replace(error=None))


def evaluation_template(setup: Setup, metadata: dict) -> TrainState:
    """The part of the abstract state that `evaluated_model` needs of a checkpoint; the rest is None.

    Outer parameters fit any mesh; replicas need one with as many of them.
    """
    if metadata["method"] == setup.psdp.name or not isinstance(setup.method, Diloco):
        part = setup.psdp.parameters_only(checkpoint_template(setup, metadata).method)
    elif evaluated(setup.config) == "outer":
        part = setup.method.parameters_only(setup.abstract_state().method)
    else:
        inner = checkpoint_template(setup, metadata).method.inner
        part = DilocoState(setup.psdp.parameters_only(inner), None, None)  # type: ignore[arg-type]
    return TrainState(None, part, None, None)


def evaluated(config: TrainConfig) -> str:
    """Which parameters of DiLoCo's are evaluated: the outer ones, or what the replicas have."""
    return config.sync.evaluate if isinstance(config.sync, DilocoConfig) else "outer"


def joined(layout: Layout) -> int:
    """How many replicas DiLoCo joins on this mesh."""
    return layout.mesh.shape[sync_axis(layout)]


def parted(setup: Setup, state: TrainState) -> TrainState:
    """A state of any method as one of PSDP: DiLoCo's replicas are joined."""
    method = setup.method
    if not isinstance(method, Diloco) or not isinstance(state.method, DilocoState):
        return state
    return _moved(setup.psdp, method.end, state, setup)


def converted(setup: Setup, state: TrainState, step: int) -> TrainState:
    """The state in the form of the method that takes the step after `step` steps.

    Errors of quantised averages start anew if the state has none, or others than the method.
    """
    method = setup.method_after(step)
    if isinstance(method, Diloco) and not isinstance(state.method, DilocoState):
        return _moved(method, method.begin, state, setup)
    if not isinstance(method, Diloco) and isinstance(state.method, DilocoState):
        state = parted(setup, state)
    wanted = abstract_state(method, setup.model).method
    if jax.tree.structure(state.method) != jax.tree.structure(wanted):
        return _moved(method, method.renewed, state, setup)
    return state


def _moved(method, change, state: TrainState, setup: Setup) -> TrainState:
    shardings = state_shardings(method, abstract_state(method, setup.model))
    move = jax.jit(lambda inner: wrapped(method, change(inner), 0), out_shardings=shardings)
    return move(state.method)._replace(step=state.step)


def evaluated_model(setup: Setup, state: TrainState):
    """The model that evaluations and samples are made with."""
    method, kind = setup.method, evaluated(setup.config)
    if not isinstance(method, Diloco) or not isinstance(state.method, DilocoState):
        return setup.psdp.trained(state.method)
    if kind == "average":
        return jax.jit(method.average)(state.method)
    if kind == "first_replica":
        return jax.jit(method.replica, static_argnums=1)(state.method, 0)
    return jax.jit(method.trained)(state.method)
