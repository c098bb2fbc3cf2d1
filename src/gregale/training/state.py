"""The one training state, and the step that moves it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gregale.axes.layout import Layout, with_shardings
from gregale.methods.psdp import StepMetrics

Tree = Any
Leaf = Any
"""An array; in an abstract state its shape, in a tree of shardings its sharding, None where a part is left out."""


class TrainState(NamedTuple):
    """Everything that a run needs to go on, and all that a checkpoint holds; arrays only."""

    step: Leaf  # int32 scalar: steps done, skipped ones too
    method: Tree  # the method's own state
    skipped: Leaf  # int32 scalar: steps skipped because loss or gradient was not finite
    skipped_in_a_row: Leaf  # int32 scalar: how many of them came last without a break


class Method(Protocol):
    """What a synchronisation method gives the trainer."""

    def init(self, model: Tree) -> Tree: ...

    def shardings(self, state: Tree) -> Tree: ...

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, StepMetrics]: ...

    def trained(self, state: Tree) -> Tree: ...


class Report(NamedTuple):
    """What a step reports, as device scalars: fetch them when they are ready, not before."""

    metrics: StepMetrics
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def initial_state(method: Method, model: Tree) -> TrainState:
    """The state before the first step; to be called under `jax.jit`, so that it is made in shards."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, method=method.init(model), skipped=zero, skipped_in_a_row=zero)


def guarded_step(method: Method) -> Callable[[TrainState, Tree], tuple[TrainState, Report]]:
    """The method's step, but one whose loss or gradient is not finite leaves the method's state as it was."""

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Report]:
        moved, metrics = method.step(state.method, batch)
        finite = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state.method)
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        return TrainState(state.step + 1, kept, skipped, in_a_row), Report(metrics, skipped, in_a_row)

    return step


def state_shardings(method: Method, state: TrainState, layout: Layout) -> TrainState:
    """Where each array of a state lives."""
    scalar = layout.sharding((), {})
    return TrainState(scalar, method.shardings(state.method), scalar, scalar)


def abstract_state(method: Method, model: Tree, layout: Layout) -> TrainState:
    """The state of a run as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated."""
    state = jax.eval_shape(lambda: initial_state(method, model))
    return with_shardings(state, state_shardings(method, state, layout))
