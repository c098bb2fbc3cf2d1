"""PSDP (replica-FSDP): gradients are averaged over `replica` once a step; the optimizer runs on the shards."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import AxisMapping, Layout, Tree
from gregale.axes.parameters import buffers_of, frozen_of, holding, static_of, trainable, with_arrays
from gregale.codecs.codec import ReduceConfig
from gregale.communication.quantised import QuantisationLoss, QuantisedReducer, Reducer
from gregale.communication.reduce import (
    Accumulated,
    ExactReducer,
    accumulate,
    cut_layers,
    joined_layers,
    max_over_replicas,
)
from gregale.methods.average import AverageConfig
from gregale.methods.method import Inspected, Limits, Method, Probe, PsdpState, SpikesConfig, StepMetrics, inspected
from gregale.methods.schedule import Traffic
from gregale.model.losses import Losses
from gregale.optim.config import Optimizer


def identity(tree: Tree) -> Tree:
    return tree


def select(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return one of two trees, by a scalar."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


def apply_updates(parameters: Tree, updates: Tree) -> Tree:
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), parameters, updates)


def divisor_of(weight: jax.Array) -> jax.Array:
    """Return the number that sums are divided by: 1 for a batch without a target, whose sums are 0."""
    return jnp.where(weight == 0, 1, weight)


@dataclass(frozen=True)
class Psdp(Method):
    """The PSDP step for any Equinox module and any loss (docs/design.md, "A PSDP step").

        grads   = (sum over replica of buffers) / (sum over replica of weights), under opt_state
        updates = optimizer(grads), under opt_state
        params  = params + (updates gathered to params)
        params  = after_update(params, largest values of `Losses.maxima`)
        buffers = update_buffers(model before the step, sums of `Losses.statistics`, sum of weights)

    - `model`: defines the structure, may be abstract (`eqx.filter_eval_shape`); its floating-point arrays are trained,
      except those that it marks as `Buffer` or `Frozen`
    - `loss`: loss(model, batch) -> `Losses`, or (sum of losses, sum of weights)
    - `update_buffers`: update_buffers(model, statistics, weight) -> the model with new buffers; default: its own
    - `after_update`: after_update(parameters, maxima) -> the parameters, changed element by element; None: nothing more
    - `optimizer`: see `gregale.optim.Optimizer`; `Optimizer.of(tx)` makes one of any optax transformation
    - `layout`: the mesh and the mappings
    - `microbatches`: parts of a replica's batch, computed in sequence
    - `gather_fn`: applied to the parameters once a step, before the microbatches (`gather: per_step` gathers them here)
    - `measure`: measure(model, batch) -> scalars by name, logged with the step
    - `reduce`: the codecs of messages over `replica`: gradients in the first phase, updates in the second
    - `spikes`: steps that are left out as spikes; None: none
    - `average`: the average of the parameters that a run keeps; None: none
    - `first_layers`: number n of layers for whose passes the transfers over `replica` of all later layers do not wait:
      the loss scans the first n apart (`Execution.first_layers`), and `reduce` is exact. 0: transfers follow the passes
    - `reference`: abstract parameters of a frozen copy of the model, which a state holds beside that of the method;
      `loss` gets their values as a third argument. None: there is no copy
    """

    model: Tree
    loss: Callable[..., Losses | tuple[jax.Array, jax.Array]]
    optimizer: Optimizer
    layout: Layout
    microbatches: int = 1
    gather_fn: Callable[[Tree], Tree] = field(default=identity)
    reduce: ReduceConfig = field(default=ReduceConfig())
    first_layers: int = 0
    spikes: SpikesConfig | None = None
    average: AverageConfig | None = None
    measure: Probe = field(default=lambda model, batch: {})
    update_buffers: Callable[[Any, dict, jax.Array], Any] = field(
        default=lambda model, statistics, weight: model.update_buffers(statistics, weight)
    )
    after_update: Callable[[Tree, dict[str, NamedArray]], Tree] | None = None
    reference: Tree = None

    name: ClassVar[str] = "psdp"

    def init(self, model: Tree | None = None) -> PsdpState:
        """Return the state before the first step, from the arrays of `model` (default: `self.model`).

        Call it under `jax.jit`, best with the model's own initialisation, to create all arrays in shards.
        """
        layout = self.layout
        model = self.model if model is None else model
        parameters = layout.constrain(trainable(model), layout.params)
        sharded = self.optimizer.sharded.init(layout.constrain(parameters, layout.opt_state))
        gathered = self.optimizer.gathered.init(parameters)
        parameters = layout.constrain(parameters, self.resting_mapping)
        buffers = layout.constrain(buffers_of(model), layout.compute)
        sharded = layout.constrain(sharded, layout.opt_state)
        return self.reset_error(PsdpState(parameters, sharded, gathered, buffers=buffers))

    @property
    def resting_mapping(self) -> AxisMapping:
        """Return the mapping of the parameters between steps: `opt_state` if a step begins with their gather."""
        return self.layout.opt_state if self.first_layers and self.optimizer.only_shards else self.layout.params

    def frozen(self, model: Tree) -> Tree:
        if self.reference is None:
            return frozen_of(model)

        def copied(leaf, like):
            return like if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(like.dtype)

        return jax.tree.map(copied, trainable(model), self.reference)

    def holding(self, frozen: Tree) -> "Psdp":
        if frozen is None:
            return self
        if self.reference is not None:
            return replace(self, reference=frozen)
        return replace(self, model=holding(self.model, frozen))

    def reset_error(self, state: PsdpState) -> PsdpState:
        return state._replace(error=self.reducer.init(state.parameters))

    def shardings(self, state: PsdpState) -> PsdpState:
        layout = self.layout
        return PsdpState(
            parameters=layout.shardings(state.parameters, self.resting_mapping),
            sharded=layout.shardings(state.sharded, layout.opt_state),
            gathered=layout.shardings(state.gathered, {}),
            error=self.reducer.shardings(state.error),
            buffers=layout.shardings(state.buffers, layout.compute),
        )

    def step(self, state: PsdpState, batch: Tree, limits: Limits | None = None) -> tuple[PsdpState, StepMetrics]:
        """Run one step on a batch: named arrays with an axis `batch`, or plain arrays whose first axis is the batch.

        A step whose loss or gradient is not finite, or above its limit, does not change the state.
        """
        ready = self.gathered_params(state)
        moved, _, metrics = self._moved(state, ready, batch)
        own = self.measure(self.model_with(joined_layers(ready), state.buffers), batch)
        metrics, counts = metrics._replace(callbacks=own), metrics.finite
        if limits is not None:
            spike = counts & ((metrics.loss > limits.loss) | (metrics.grad_norm > limits.norm))
            metrics, counts = metrics._replace(spike=spike), counts & ~spike
        return select(counts, moved, state), metrics

    def inspected(self, state: PsdpState, batch: Tree, probe: Probe) -> Inspected:
        ready = self.gathered_params(state)
        moved, grads, _ = self._moved(state, ready, batch)
        probed = probe(self.model_with(joined_layers(ready), state.buffers), batch)
        return inspected(state.parameters, grads, moved.parameters, probed)

    def _moved(self, state: PsdpState, ready: Tree, batch: Tree) -> tuple[PsdpState, Tree, StepMetrics]:
        """Return the state after a batch, finite or not, the averaged gradients under `opt_state`, and the metrics."""
        sums, reducer = self.accumulate_gradients(ready, batch, state.buffers), self.reducer
        weight, loss, *named = reducer.all_reduce_scalars(sums.weight, sums.loss, *sums.named.values())
        divisor = divisor_of(weight)
        loss, named = loss / divisor, {name: each / divisor for name, each in zip(sums.named, named, strict=True)}
        reduced, error = reducer.reduce(sums.gradients, divisor, state.error)
        grads = joined_layers(reduced)
        updates, moved, norm = self.update(state._replace(error=error), grads)
        moved = self.apply(moved, updates)._replace(buffers=self._next_buffers(state, sums, weight))
        if self.after_update is not None:
            maxima = {name: max_over_replicas(each, self.layout) for name, each in sums.maxima.items()}
            parameters = self.layout.constrain(self.after_update(moved.parameters, maxima), self.resting_mapping)
            moved = moved._replace(parameters=parameters)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        return moved, grads, StepMetrics(loss, weight, norm, finite, named=named)

    def gathered_params(self, state: PsdpState) -> Tree:
        """Return the parameters under `params`, those of `first_layers` apart from the others."""
        layout, parameters = self.layout, state.parameters
        if not self.first_layers:
            return parameters
        return layout.constrain(
            layout.constrain(cut_layers(parameters, self.first_layers), self.resting_mapping), layout.params
        )

    def accumulate_gradients(self, ready: Tree, batch: Tree, buffers: Tree = None) -> Accumulated:
        """Return the gradients by the parameters of `ready` on a batch, separate for each replica."""
        return self._traced_sums(ready, batch, buffers)

    @cached_property
    def _traced_sums(self) -> Callable[[Tree, Tree, Tree], Accumulated]:
        """Return `_sums`, whose trace takes the most time, once for all programs of a method without frozen weights.

        With frozen weights each program has a method of its own, see `holding`.
        """
        return jax.jit(self._sums, inline=True)

    def _sums(self, ready: Tree, batch: Tree, buffers: Tree) -> Accumulated:
        copy = () if self.reference is None else (self.gather_fn(self.reference),)
        held = self if copy else self.holding(self.gather_fn(frozen_of(self.model)))

        def loss(parameters: Tree, batch: Tree):
            return self.loss(held.model_with(joined_layers(parameters), buffers), batch, *copy)

        return accumulate(loss, ready, batch, self.layout, self.microbatches, self.gather_fn)

    def _next_buffers(self, state: PsdpState, sums: Accumulated, weight: jax.Array) -> Tree:
        """Return the model's buffers after a step, from its sums over all replicas."""
        if state.buffers is None:
            return None
        model = self.model_with(self.layout.constrain(state.parameters, self.layout.params), state.buffers)
        names = [array.axis_names[1:] for array in sums.statistics.values()]
        totals = map(NamedArray, self.reducer.all_reduce_scalars(*sums.statistics.values()), names)
        updated = self.update_buffers(model, dict(zip(sums.statistics, totals, strict=True)), weight)
        return self.layout.constrain(buffers_of(updated), self.layout.compute)

    def update(self, state: PsdpState, grads: Tree) -> tuple[Tree, PsdpState, jax.Array]:
        """Run the optimizer on averaged gradients under `opt_state`.

        Returns the updates under `opt_state`, the state with the optimizer's next state, and the norm of the gradients.
        """
        layout = self.layout
        norm = self.reducer.norm(grads)
        shard = layout.constrain(state.parameters, layout.opt_state)
        updates, sharded = self.optimizer.sharded.update(grads, state.sharded, shard, gradient_norm=norm)
        updates, sharded = layout.constrain((updates, sharded), layout.opt_state)
        return updates, state._replace(sharded=sharded), norm

    def apply(self, state: PsdpState, updates: Tree) -> PsdpState:
        """Add updates under `opt_state` to the parameters, and gather them before if these lie under `params`."""
        layout = self.layout
        if self.resting_mapping is not layout.params:
            parameters = apply_updates(state.parameters, updates)
            return state._replace(parameters=layout.constrain(parameters, self.resting_mapping))
        updates, error = self.reducer.all_gather_params(updates, state.error)  # type: ignore[arg-type]
        updates, gathered = self.optimizer.gathered.update(updates, state.gathered, state.parameters)
        parameters = apply_updates(state.parameters, updates)
        return state._replace(parameters=layout.constrain(parameters, layout.params), gathered=gathered, error=error)

    def quantisation_loss(self, state: PsdpState, batch: Tree) -> QuantisationLoss:
        """Return the quantisation loss of a batch's gradients, in a separate program, with `reduce` quantised."""
        reducer = self.reducer
        assert reducer.quantised is True
        sums = self.accumulate_gradients(self.gathered_params(state), batch, state.buffers)
        (weight,) = reducer.all_reduce_scalars(sums.weight)
        return reducer.measure(sums.gradients, divisor_of(weight), state.error)

    def from_psdp(self, start: PsdpState, step: Any) -> PsdpState:
        del step
        return self.reset_error(start)

    def to_psdp(self, state: PsdpState) -> PsdpState:
        return self.without_error(state)

    def without_error(self, state: PsdpState) -> PsdpState:
        return state._replace(error=None)

    def bytes_sent(self, step: int) -> int:
        """Return a device's bytes over `replica` in the first `step` steps, for gradients and updates."""
        return step * self.reducer.bytes_sent(trainable(self.model))

    def trees(self, state: PsdpState) -> dict[str, Tree]:
        return {"parameters": state.parameters, "optimizer": (state.sharded, state.gathered)}

    def traffic(self) -> Traffic:
        return Traffic.of_every_step(self.reducer, trainable(self.model))

    def averaged_parameters(self, state: PsdpState) -> Tree:
        return self.layout.constrain(state.parameters, self.layout.opt_state)

    def eval_model(self, state: PsdpState) -> Tree:
        return self.model_with(self.layout.constrain(state.parameters, self.layout.params), state.buffers)

    def arrays(self, state: PsdpState) -> Tree:
        """Return the parameters and buffers of a state, in the structure of the model."""
        return with_arrays(state.parameters, state.buffers)

    def model_with(self, parameters: Tree, buffers: Tree = None) -> Tree:
        return eqx.combine(with_arrays(parameters, buffers), self._static)

    def eval_subset(self, state: PsdpState) -> PsdpState:
        return PsdpState(state.parameters, None, None, buffers=state.buffers)

    @property
    def reducer(self) -> Reducer:
        return QuantisedReducer(self.layout, self.reduce) if self.reduce.quantised else ExactReducer(self.layout)

    @property
    def _static(self) -> Tree:
        return static_of(self.model)
