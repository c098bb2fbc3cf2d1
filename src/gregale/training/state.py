"""The state of training, and the guarded step that updates it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import Tree, with_shardings
from gregale.axes.parameters import with_arrays
from gregale.methods.average import Average
from gregale.methods.method import Method, SpikeWindow, StepMetrics
from gregale.model.config import CompilerOptions
from gregale.training.compiler import fast_compile_options

Leaf = Any
"""An array; in an abstract state its shape, in a tree of shardings its sharding; None for an omitted part."""


class TrainState(NamedTuple):
    """The complete state of a run; arrays only."""

    step: Leaf  # int32 scalar: steps done, including skipped steps
    method: Tree  # the method's own state
    skipped: Leaf  # int32 [*replica_axes]: steps skipped because loss or gradient was not finite
    skipped_in_a_row: Leaf  # int32 [*replica_axes]: skipped steps since the last step that was not skipped
    spikes: Tree = None  # `SpikeWindow`, if the method leaves out spikes
    average: Tree = None  # `Average`, if the run keeps one
    joined: Tree = None  # only in a checkpoint of a method that `needs_full_state`: parameters and buffers of `to_psdp`
    frozen: Tree = None  # weights that nothing trains, under `params`; never in a checkpoint


class StepReport(NamedTuple):
    """The report of a step, as device arrays; fetch them only when they are ready, to avoid waiting."""

    metrics: StepMetrics
    skipped: Leaf
    skipped_in_a_row: Leaf
    spikes: Leaf = None  # steps left out as spikes


def initial_state(
    method: Method, make_model: Callable[..., Tree], options: CompilerOptions | None = None, *given: Tree
) -> TrainState:
    """Return the sharded state before the first step; `make_model` is traced, so each weight is created in shards.

    - `options`: compiler options, see `gregale.training.compiler`
    - `given`: sharded arguments of `make_model`, which are donated
    """

    def make(*given: Tree) -> TrainState:
        model = make_model(*given)
        return new_train_state(method, method.init(model), 0)._replace(frozen=method.frozen(model))

    shardings = state_shardings(method, jax.eval_shape(make, *given))
    options = {**(fast_compile_options(method.layout.mesh) or {}), **(options or {})}
    donated = tuple(range(len(given)))
    return jax.jit(make, out_shardings=shardings, donate_argnums=donated, compiler_options=options or None)(*given)


def new_train_state(method: Method, state: Tree, step: int) -> TrainState:
    """Return a method's state as a training state after `step` steps without skipped steps."""
    zeros = jnp.zeros(_replicas(method), jnp.int32)
    done = jnp.full((), step, jnp.int32)
    counts = {"skipped": zeros, "skipped_in_a_row": zeros, "spikes": new_spikes(method)}
    return TrainState(done, state, **counts, average=new_average(method, state))


def new_average(method: Method, state: Tree) -> Average | None:
    """Return the average of the parameters of a method's state before the first addition; None: the run keeps none."""
    return None if method.average is None else Average.begin(method.averaged_parameters(state))


def with_average(method: Method, state: TrainState) -> TrainState:
    """Return a training state with its parameters added to their average."""
    assert method.average is not None
    parameters = method.averaged_parameters(state.method)
    return state._replace(average=state.average.with_added(parameters, method.average.decay))


def eval_model(method: Method, state: Tree, average: Average | None) -> Tree:
    """Return the model to evaluate of a method's state; with the average in place of the parameters, if it is given."""
    model = method.eval_model(state)
    if average is None:
        return model
    return with_arrays(model, method.layout.constrain(average.parameters, method.layout.params))


def new_spikes(method: Method) -> SpikeWindow | None:
    """Return an empty window of spikes; None if the method leaves out none."""
    return None if method.spikes is None else SpikeWindow.empty(method.spikes, _replicas(method))


def _replicas(method: Method) -> tuple[int, ...]:
    return tuple(method.layout.axis(axis).size for axis in method.replica_axes)


def counted_step(method: Method, state: TrainState, batch: Tree, *during: Any) -> tuple[TrainState, StepReport]:
    """Run the method's step; count the steps, those skipped because loss or gradient was not finite, and the spikes."""
    window, limited = state.spikes, {}
    if method.spikes is not None:
        limited = {"limits": window.limits(method.spikes.sigma)}
    updated, metrics = method.holding(state.frozen).step(state.method, batch, *during, **limited)
    skipped = state.skipped + ~metrics.finite
    in_a_row = jnp.where(metrics.finite, 0, state.skipped_in_a_row + 1)
    if window is not None:
        window = window.after(metrics.loss, metrics.grad_norm, metrics.finite, metrics.spike)
    report = StepReport(metrics, skipped, in_a_row, None if window is None else window.spikes)
    counts = {"skipped": skipped, "skipped_in_a_row": in_a_row, "spikes": window}
    return state._replace(step=state.step + 1, method=updated, **counts), report


def state_shardings(method: Method, state: TrainState) -> TrainState:
    mesh = method.layout.mesh
    counts = NamedSharding(mesh, PartitionSpec(*method.replica_axes))
    frozen = method.layout.shardings(state.frozen, method.layout.params)
    windows = jax.tree.map(lambda _: counts, state.spikes)
    scalar, outer = NamedSharding(mesh, PartitionSpec()), method.outer_layout
    average = outer.shardings(state.average, outer.opt_state)
    return TrainState(scalar, method.shardings(state.method), counts, counts, windows, average, frozen=frozen)


def abstract_state(method: Method, model: Tree) -> TrainState:
    """Return the state of a run as `jax.ShapeDtypeStruct`s with shardings, without allocating arrays."""
    state = jax.eval_shape(lambda: new_train_state(method, method.init(model), 0))
    state = state._replace(frozen=method.frozen(model))
    return with_shardings(state, state_shardings(method, state))


class Stepper:
    """Runs the steps of a method with the method's actions; compiles each program at its first use.

    There is one program for each kind of step: fragments of equal size share a program.

    - `method`: the method
    - `model`: its model, abstract or not
    - `options`: compiler options, see `gregale.training.compiler`
    """

    def __init__(self, method: Method, model: Tree, options: CompilerOptions | None = None):
        self._method = method
        shardings = state_shardings(method, abstract_state(method, model))
        compiled = partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
        self.program = compiled(partial(counted_step, method))
        self.synchronise = compiled(self._after)
        self.add = None if method.average is None else compiled(partial(with_average, method), out_shardings=shardings)

    def __call__(self, state: TrainState, batch: Tree, step: int) -> tuple[TrainState, StepReport]:
        """Run step number `step` (from 1); `state` is donated."""
        actions = self._method.actions(step)
        state, report = self.program(state, batch, *actions.step_args)
        if actions.post_step is not None:
            state, outer = self.synchronise(state, actions.post_step)
            report = report._replace(metrics=report.metrics._replace(outer=outer))
        if (add := self._due(step)) is not None:
            state = add(state)
        return state, report

    def _due(self, step: int) -> Callable[..., Any] | None:
        """Return the program that adds the parameters after a step to their average; None: they are not added."""
        average = self._method.average
        return self.add if average is not None and step % average.every == 0 else None

    def compilations(self, state: TrainState, batch: Tree, steps: Sequence[int]) -> Iterator[Callable[[], Any]]:
        """Yield functions that compile the programs of some steps, which later calls with such arrays use.

        - `state`, `batch`: `jax.ShapeDtypeStruct`s with the shardings of the arrays
        """
        found = set()
        for step in steps:
            actions = self._method.actions(step)
            calls = [(self.program, (batch, *actions.step_args))]
            calls += [] if actions.post_step is None else [(self.synchronise, (actions.post_step,))]
            calls += [] if (add := self._due(step)) is None else [(add, ())]
            for program, arguments in calls:
                leaves, structure = jax.tree.flatten(arguments)
                key = program, structure, *map(jax.typeof, leaves)
                if key not in found:
                    found.add(key)
                    yield lambda program=program, arguments=arguments: program.lower(state, *arguments).compile()

    def _after(self, state: TrainState, after: Any) -> tuple[TrainState, Any]:
        updated, outer = self._method.synchronise(state.method, after)
        return state._replace(method=updated), outer
