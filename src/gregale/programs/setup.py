"""From a configuration to everything that is compiled: layout, model, method, step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from haliax import Axis
from jax.sharding import Mesh

from gregale.axes.layout import BATCH, Layout, check_divides, standard_layout
from gregale.axes.mesh import make_mesh
from gregale.communication.accumulate import rows_per_part
from gregale.errors import UserError
from gregale.methods.psdp import Psdp, same
from gregale.model.attention import POSITION
from gregale.model.execution import Execution, execution
from gregale.model.registry import init_model
from gregale.services.config import TrainConfig
from gregale.training.state import TrainState, abstract_state, guarded_step, initial_state, state_shardings

VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class Setup:
    """What a configuration becomes on a mesh.

    - `layout`: mesh and mappings
    - `Vocab`: the model's vocabulary, padded
    - `model`: the abstract model; nothing is allocated
    - `method`: the synchronisation method
    """

    config: TrainConfig
    layout: Layout
    Vocab: Axis
    model: object
    method: Psdp

    @property
    def batch_axes(self) -> tuple[Axis, Axis]:
        batch = self.config.batch
        return Axis(BATCH, batch.size), Axis(POSITION, batch.sequence_length)

    def initial_state(self) -> TrainState:
        """The state before the first step, made in shards."""
        shardings = state_shardings(self.method, self.abstract_state(), self.layout)
        key = jax.random.key(self.config.seed)
        return jax.jit(lambda key: initial_state(self.method, self.init_model(key)), out_shardings=shardings)(key)

    def init_model(self, key):
        return init_model(self.config.model, self.Vocab, key)

    def abstract_state(self) -> TrainState:
        return abstract_state(self.method, self.model, self.layout)

    def jitted_step(self) -> Callable:
        """The compiled-on-first-use step: (state, batch) -> (state, report); the state is donated."""
        state = self.abstract_state()
        shardings = state_shardings(self.method, state, self.layout)
        scalar = self.layout.sharding((), {})
        return jax.jit(guarded_step(self.method), donate_argnums=0, out_shardings=(shardings, scalar))

    def learning_rate(self, update: int) -> float:
        """The learning rate of an update, counted from 1; skipped steps make none."""
        return float(jnp.asarray(self.method.optimizer.learning_rate(update - 1)))

    def parameters_only(self, state: TrainState) -> TrainState:
        """The part of a state that a trained model needs; the rest is None."""
        method = state.method._replace(sharded=None, gathered=None)
        return TrainState(step=None, method=method, skipped=None, skipped_in_a_row=None)

    def evaluation_execution(self) -> Execution:
        """How held-out losses are computed: all replicas share the batch, nothing is differentiated."""
        inside = execution(self.config.compute, self.layout)
        return Execution(**{**vars(inside), "layout": self.layout, "remat": "none"})


def padded_vocabulary(config: TrainConfig, tokens: int) -> Axis:
    """The model's vocabulary axis for a tokenizer of so many tokens."""
    wanted = getattr(config.model, "vocabulary", None)
    if wanted is not None and wanted < tokens:
        raise UserError(
            f"model.vocabulary is {wanted}, but the tokenizer has {tokens} tokens; it has to be at least {tokens}, or "
            f"null for the tokenizer's own, padded to a multiple of {VOCABULARY_MULTIPLE}."
        )
    return Axis("vocab", wanted or -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)


def checked_layout(config: TrainConfig, mesh: Mesh, Vocab: Axis) -> Layout:
    """The layout of a run; raises `UserError` for whatever the mesh does not divide, before anything is compiled."""
    layout = standard_layout(mesh)
    batch = config.batch
    check_divides(
        layout,
        {
            "batch.size": ("the sequences of a step", Axis(BATCH, batch.size)),
            **config.model.split_axes(),
            "model.vocabulary": ("the vocabulary", Vocab),
        },
    )
    inner = layout.inside_replica()
    shards = prod(mesh.shape[axis] for axis in inner.mesh_axes((BATCH,), inner.compute))
    rows_per_part(batch.size, layout.replicas, shards, batch.microbatches)
    return layout


def set_up(config: TrainConfig, tokens: int, mesh: Mesh | None = None) -> Setup:
    """Builds what a configuration asks for; nothing is allocated or compiled.

    Arguments:
    - `tokens`: the tokenizer's vocabulary size
    - `mesh`: default: the configured one on all devices

    Raises `UserError` for what does not fit together.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    Vocab = padded_vocabulary(config, tokens)
    layout = checked_layout(config, mesh, Vocab)
    run = execution(config.compute, layout)
    model = jax.eval_shape(partial(init_model, config.model, Vocab), jax.random.key(0))
    method = Psdp(
        model=model,
        loss=lambda model, batch: model.loss(batch, run),
        optimizer=config.optimizer.build(model, config.steps, layout),
        layout=layout,
        microbatches=config.batch.microbatches,
        prepare=run.gathered if config.compute.gather == "per_step" else same,
    )
    return Setup(config, layout, Vocab, model, method)
