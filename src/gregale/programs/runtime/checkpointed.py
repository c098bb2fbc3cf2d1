"""Provides the form of the state in a run's checkpoint, and the checkpoint's metadata."""

from collections.abc import Mapping
from typing import Any

import draccus
import jax

from gregale.axes.layout import Layout
from gregale.data.build import MASKS
from gregale.data.mixtures import Mixtures, MixtureStage, with_mixture
from gregale.data.preparation import Corpus
from gregale.errors import UserError
from gregale.methods.method import Method
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.training.state import TrainState, abstract_state


def checkpointed(setup: Setup, method: Method, state: TrainState, step: int) -> TrainState:
    """Return the state after `step` steps as stored, with joined arrays for an evaluation that has no replicas.

    Frozen weights are not stored: the metadata has their origin.
    """
    state = state._replace(frozen=None)
    if not method.needs_full_state(step):
        return state
    assert method is setup.method
    return state._replace(joined=setup.joined_parameters(state.method))


def checkpoint_metadata(
    setup: Setup, corpus: Corpus, method: Method, step: int, counted: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata that a restore reads before the state after `step` steps.

    - `method`: the method that made the state
    - `counted`: counts so far by name: `replica_bytes` that a device has sent over `replica`, `examples` seen, and
      the `mixtures` that they are of
    """
    config: dict = draccus.encode(setup.config)  # type: ignore[assignment] -- of a part alone it has no `type`
    return {
        "data": corpus.fingerprint_after(counted["mixtures"]),
        "validation": corpus.validation_fingerprints,
        "masks": MASKS,
        "method": method.name,
        "joined": method.needs_full_state(step),
        "replicas": replicas(setup.layout, method),
        "mesh": dict(setup.layout.mesh.shape),
        "spikes": spike_window(setup),
        "made_by": {name: config[name] for name in ("sync", "reduce")},
        **counted,
    }


def recorded(metadata: Mapping[str, Any], key: str):
    """Return an entry of a checkpoint's metadata; raise `UserError` if another version wrote it without this entry."""
    if key not in metadata:
        raise UserError(
            f"The checkpoint's metadata.json lacks `{key}` (it has: {', '.join(metadata) or 'nothing'}): another "
            f"version of Gregale wrote it. Use that version, or start another run with a new name or with --fresh."
        )
    return metadata[key]


def newer_masks(metadata: Mapping[str, Any], corpus: Corpus) -> str:
    """Return why conversations of the same text may have other tokens than at a checkpoint; empty if nothing does.

    A version before these rules had numbers wrote none.
    """
    before = metadata.get("masks", "an older one")
    if before == MASKS or not any("chat_template" in store.manifest for store in corpus.stores.values()):
        return ""
    return (
        "this version of Gregale has newer rules for roles of conversations and for the tokens that the loss is on: "
        f"version {MASKS}, and the checkpoint's is {before}. The text may be the same"
    )


def mixtures_of(metadata: dict, config: TrainConfig) -> Mixtures:
    """Return the mixtures of a run up to a checkpoint.

    - `config`: of the checkpoint; an earlier version wrote no mixtures, and its runs have one
    """
    stored = metadata.get("mixtures")
    if stored is None:
        return with_mixture((), 0, *config.mixture)
    return tuple(MixtureStage(*each) for each in stored)


def saved_by(setup: Setup, metadata: dict) -> Method:
    return setup.psdp if recorded(metadata, "method") == setup.psdp.name else setup.method


def checkpoint_template(setup: Setup, metadata: dict) -> TrainState:
    """Return the abstract state that a checkpoint with this metadata holds.

    It lacks the errors of quantised averages if they are of another mesh, because their shapes depend on the mesh.
    """
    method = saved_by(setup, metadata)
    saved, now = recorded(metadata, "replicas"), replicas(setup.layout, method)
    if saved != now:
        axis = method.replica_axes[0]
        raise UserError(
            f"mesh.{axis} is {now}, but the checkpoint is of {method.name} with {saved} replicas, each with "
            f"parameters and an optimizer of its own. Resume with mesh.{axis} {saved}; to change their number, first "
            f"resume with sync.type psdp until the next checkpoint, which joins them."
        )
    state = abstract_state(method, setup.model)._replace(frozen=None)
    if not same_spikes(setup, metadata):
        state = state._replace(spikes=None)
    return state if same_mesh(setup, metadata) else state._replace(method=method.without_error(state.method))


def holds_more(setup: Setup, metadata: dict) -> bool:
    """Return whether a checkpoint holds more than `checkpoint_template`: joined parameters, errors of another mesh,
    another window of spikes.
    """
    return recorded(metadata, "joined") or not same_mesh(setup, metadata) or not same_spikes(setup, metadata)


def evaluation_template(setup: Setup, metadata: dict) -> TrainState:
    """Return the abstract state with only the leaves that an evaluation needs; the rest is None.

    It fits any mesh, except for an evaluation of the replicas' own parameters, which needs the same number of replicas.
    """
    method = saved_by(setup, metadata)
    if setup.config.sync.evaluates_replicas:
        return TrainState(None, method.eval_subset(checkpoint_template(setup, metadata).method), None, None)
    if recorded(metadata, "joined"):
        joined = setup.psdp.arrays(abstract_state(setup.psdp, setup.model).method)
        return TrainState(None, None, None, None, joined=joined)
    return TrainState(None, method.eval_subset(abstract_state(method, setup.model).method), None, None)


def evaluated_model(setup: Setup, metadata: dict, state: TrainState):
    """Return the model to evaluate, from the state of `evaluation_template`."""
    if state.joined is not None:
        return setup.psdp.model_with(state.joined)
    trained = jax.jit(saved_by(setup, metadata).eval_model, compiler_options=setup.compiler_options)
    return trained(state.method)


def same_mesh(setup: Setup, metadata: dict) -> bool:
    return recorded(metadata, "mesh") == dict(setup.layout.mesh.shape)


def same_spikes(setup: Setup, metadata: dict) -> bool:
    """Return whether a checkpoint has the window of `skip_spikes` that the configuration has, or neither has one."""
    return metadata.get("spikes") == spike_window(setup)


def spike_window(setup: Setup) -> int | None:
    return None if setup.config.skip_spikes is None else setup.config.skip_spikes.window


def replicas(layout: Layout, method: Method) -> int:
    """Return the number of replicas whose states the method keeps separately."""
    return layout.mesh.shape[method.replica_axes[0]] if method.replica_axes else 1
