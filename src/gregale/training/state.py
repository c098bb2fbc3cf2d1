"""The one training state, and the step that moves it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import with_shardings
from gregale.methods.method import Method, StepMetrics
from gregale.model.config import CompilerOptions
from gregale.training.fast_compile_options import fast_compile_options

Tree = Any
Leaf = Any
"""An array; in an abstract state its shape, in a tree of shardings its sharding, None where a part is left out."""


class TrainState(NamedTuple):
    """Everything that a run needs to go on, and all that a checkpoint holds; arrays only."""

    step: Leaf  # int32 scalar: steps done, skipped ones too
    method: Tree  # the method's own state
    skipped: Leaf  # int32 [*lanes]: steps skipped because loss or gradient was not finite
    skipped_in_a_row: Leaf  # int32 [*lanes]: how many of them came last without a break
    joined: Tree = None  # only in a checkpoint of a method with something `due`: the parameters of its `end`


class StepReport(NamedTuple):
    """What a step reports, as device arrays: fetch them when they are ready, not before."""

    metrics: StepMetrics
    skipped: Leaf
    skipped_in_a_row: Leaf


def initial_state(
    method: Method, make_model: Callable[..., Tree], options: CompilerOptions | None = None, *given: Tree
) -> TrainState:
    """The state before the first step, made in shards; `make_model` is traced, so no weight is made in one piece.

    - `options`: the compiler's, see `gregale.training.compiler_options`
    - `given`: what `make_model` takes, in shards; it is used up
    """

    def make(*given: Tree) -> TrainState:
        return wrapped(method, method.init(make_model(*given)), 0)

    shardings = state_shardings(method, jax.eval_shape(make, *given))
    options = {**(fast_compile_options(method.layout.mesh) or {}), **(options or {})}
    used_up = tuple(range(len(given)))
    return jax.jit(make, out_shardings=shardings, donate_argnums=used_up, compiler_options=options or None)(*given)


def wrapped(method: Method, state: Tree, step: int) -> TrainState:
    """A method's state as a training state after `step` steps, with nothing skipped yet."""
    none = jnp.zeros([method.layout.axis(lane).size for lane in method.replica_axes], jnp.int32)
    return TrainState(step=jnp.full((), step, jnp.int32), method=state, skipped=none, skipped_in_a_row=none)


def counted_step(method: Method, state: TrainState, batch: Tree, *during: Any) -> tuple[TrainState, StepReport]:
    """The method's step, with the steps counted and those that were skipped as not finite."""
    moved, metrics = method.step(state.method, batch, *during)
    skipped = state.skipped + ~metrics.finite
    in_a_row = jnp.where(metrics.finite, 0, state.skipped_in_a_row + 1)
    return TrainState(state.step + 1, moved, skipped, in_a_row), StepReport(metrics, skipped, in_a_row)


def state_shardings(method: Method, state: TrainState) -> TrainState:
    """Where each array of a state lives."""
    mesh = method.layout.mesh
    lanes = NamedSharding(mesh, PartitionSpec(*method.replica_axes))
    return TrainState(NamedSharding(mesh, PartitionSpec()), method.shardings(state.method), lanes, lanes)


def abstract_state(method: Method, model: Tree) -> TrainState:
    """The state of a run as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated."""
    state = jax.eval_shape(lambda: wrapped(method, method.init(model), 0))
    return with_shardings(state, state_shardings(method, state))
