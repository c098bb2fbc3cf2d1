"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (2501.18512): replicas apart, joined by an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import BATCH, EMBED, ISLAND, REPLICA, Layout, is_named, is_parameter, vmap_over
from gregale.codecs.config import ReduceConfig
from gregale.communication.quantised import Lost, QuantisedReducer
from gregale.communication.reduce import ExactReducer, give_back, reduce_replicas
from gregale.errors import UserError
from gregale.methods.agreement import PseudoGradient, products
from gregale.methods.fragments import FRAGMENT, Fragment, errors_per_fragment, layers_in, per_fragment
from gregale.methods.outer import ExactOuter, Outer, QuantisedOuter, sending_layout
from gregale.methods.psdp import Actions, Psdp, PsdpState
from gregale.methods.schedule import Schedule
from gregale.optim.config import Optimizer

Tree = Any


class DilocoState(NamedTuple):
    """What DiLoCo carries from step to step."""

    inner: PsdpState  # every array with a leading [replica]: parameters and optimizer state of each replica
    outer: Outer  # the outer parameters, and their optimizer's state
    seen: NamedArray  # [fragment, replica] float32: weight of the tokens since the fragment was last sent


def sync_axis(layout: Layout) -> str:
    """The axis whose indices DiLoCo joins: `island` if there are several islands, else `replica`."""
    return ISLAND if layout.mesh.shape[ISLAND] > 1 else REPLICA


@dataclass(frozen=True)
class Diloco:
    """DiLoCo on any Equinox module and loss (DESIGN section 4).

    Each replica k makes the steps of `inner`, a PSDP step on its own rows of the batch, under vmap: nothing crosses
    the axis. After H steps, for each fragment f at its own offset,

        g            = theta_f - sum_k w_k theta_k,f / sum_k w_k          # SEND; w_k: tokens that replica k saw
        theta_f      = theta_f + outer(g)
        theta_k,f    = alpha theta_k,f + (1 - alpha) theta_f              # APPLY, tau steps later

    SEND is one reduce-scatter of the fragment over the axis, APPLY one all-gather. With tau >= 1 the SEND after step t
    is computed in the program of step t + 1, from that step's input, and the APPLY of step t + tau gathers theta_f in
    the program of that step: neither depends on the step's forward and backward pass, so the compiler can hide them
    behind it, each alone if tau >= 2. With tau = 0 both follow the step in a program of their own (`synchronise`).

    - `inner`: the step of one replica; its layout is `layout.inside(axis)`
    - `outer`: the outer optimizer, of optax; element-wise
    - `layout`: the whole mesh
    - `schedule`: H, P, tau, and which layers a fragment has
    - `mixing`: alpha, what a replica keeps of its own when a fragment is applied
    - `dropout`: probability that a replica is left out of a fragment's synchronisation and goes on from its own
    - `seed`: of the dropout
    - `reduce`: the codecs of what crosses the axis: pseudo-gradients in the first leg, outer updates in the second
    """

    inner: Psdp
    outer: optax.GradientTransformation
    layout: Layout
    schedule: Schedule
    mixing: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    reduce: ReduceConfig = field(default=ReduceConfig())

    name: ClassVar[str] = "diloco"

    @staticmethod
    def of(
        model: Tree,
        loss: Callable[[Any, Tree], tuple[jax.Array, jax.Array]],
        inner: optax.GradientTransformation,
        outer: optax.GradientTransformation,
        layout: Layout,
        schedule: Schedule,
        mixing: float = 0.0,
    ) -> Diloco:
        """DiLoCo of any model and loss, with optax transformations that may work on shards.

        Arguments:
        - `model`, `loss`: as of `Psdp`
        - `inner`: each replica's optimizer
        - `outer`, `layout`, `schedule`, `mixing`: as of the class

        Raises `UserError` if the schedule's fragments are of another number of layers than the model has.
        """
        layers = layers_in(model)
        if schedule.fragments > 1 and schedule.layers != layers:
            raise UserError(
                f"the schedule is for {schedule.layers} layers, but the model's arrays are stacked over {layers} on "
                f"the axis `layers`: Schedule(..., layers={layers}) would fit it."
            )
        step = Psdp(model, loss, Optimizer.of(inner), layout.inside(sync_axis(layout)))
        return Diloco(step, outer, layout, schedule, mixing)

    @property
    def axis(self) -> str:
        return sync_axis(self.layout)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The axes of the step's metrics: each replica makes its own step."""
        return (self.axis,)

    @property
    def outer_layout(self) -> Layout:
        """The layout whose `opt_state` splits the outer parameters over the axis too, as the finest split."""
        finest = dict.fromkeys((*self.layout.mesh_axes((EMBED,), self.layout.opt_state), self.axis))
        return replace(self.layout, opt_state={**self.layout.opt_state, EMBED: tuple(finest)})

    def init(self, model: Tree | None = None) -> DilocoState:
        """The state before the first step: every replica starts from the outer parameters."""
        return self.begin(self.inner.init(model))

    def begin(self, start: PsdpState) -> DilocoState:
        """The state in which every replica goes on from a PSDP state."""
        Lanes, fragments = self.layout.axis(self.axis), self.schedule.fragments
        start = start._replace(error=None)  # replicas do not quantise what they average inside
        inner = vmap_over(lambda _: start, self.axis, self.layout)(hax.zeros(Lanes))
        outer = self.joint.begin(start.parameters)
        outer = outer._replace(optimizer=per_fragment(self.outer, outer.optimizer, fragments))
        return self.renewed(DilocoState(inner, outer, hax.zeros((hax.Axis(FRAGMENT, fragments), Lanes))))

    def renewed(self, state: DilocoState) -> DilocoState:
        """A state of any mesh with no error of quantised averages yet."""
        error = self.joint.reducer.init(state.outer.parameters)
        error = errors_per_fragment(error, self.schedule.fragments)
        return state._replace(outer=state.outer._replace(error=error))

    def end(self, state: DilocoState) -> PsdpState:
        """The PSDP state that goes on from the outer parameters, with the average of the replicas' optimizer states.

        It has no error of quantised averages; `Psdp.renewed` gives it one.
        """
        layout = self.layout

        def average(leaf):
            array = leaf.array if is_named(leaf) else leaf
            if not jnp.issubdtype(array.dtype, jnp.floating):
                return leaf[self.axis, 0] if is_named(leaf) else leaf[0]
            return reduce_replicas(leaf, layout.axis(self.axis).size, self.outer_layout, self.axis)

        sharded, gathered = jax.tree.map(average, (state.inner.sharded, state.inner.gathered), is_leaf=is_named)
        sharded = layout.constrain(sharded, layout.opt_state)
        return PsdpState(self.outer_parameters(state), sharded, gathered)

    def shardings(self, state: DilocoState) -> DilocoState:
        """Where each array of a state lives."""
        layout, inside = self.layout, self.inner.layout

        def per_replica(tree, mapping):
            places = layout.shardings(tree, {**mapping, self.axis: self.axis})
            first = NamedSharding(layout.mesh, PartitionSpec(self.axis))
            return jax.tree.map(lambda leaf, place: place if is_named(leaf) else first, tree, places, is_leaf=is_named)

        inner = PsdpState(
            parameters=per_replica(state.inner.parameters, inside.params),
            sharded=per_replica(state.inner.sharded, inside.opt_state),
            gathered=per_replica(state.inner.gathered, {}),
        )
        seen = layout.shardings(state.seen, {self.axis: self.axis})
        return DilocoState(inner, self.joint.shardings(state.outer), seen)

    def actions(self, step: int) -> Actions:
        """What step number `step` (from 1) does beside its update."""
        schedule = self.schedule
        if schedule.delay == 0:
            return Actions((None, None), Fragment.at(schedule, schedule.sent(step), step))
        send = Fragment.at(schedule, schedule.sent(step - 1), step - 1)
        apply = Fragment.at(schedule, schedule.applied(step), step - schedule.delay)
        return Actions((send, apply))

    def step(self, state: DilocoState, batch: Tree, send: Fragment | None = None, apply: Fragment | None = None):
        """One step of every replica on its rows of the batch; replica k has the k-th block of rows.

        Arguments:
        - `send`: the fragment that was due after the step before; it is read from `state` as it comes in
        - `apply`: the fragment that is due after this step
        """
        outer, figures = state.outer, None
        if send is not None:
            outer, figures = self._send(state, send)
        # A fragment that was sent earlier is read from the state that came in, so that it waits for no send.
        arriving = outer if self.schedule.delay == 1 else state.outer
        inner, metrics = vmap_over(self.inner.step, self.axis, self.layout)(state.inner, self._by_replica(batch))
        if apply is not None:
            parameters, changed = self._apply(inner.parameters, arriving, apply)
            inner, outer = inner._replace(parameters=parameters), apply.put(outer, changed)
        seen = self._forget(state.seen, send) + NamedArray(metrics.weight, (self.axis,))
        return DilocoState(inner, outer, seen), metrics._replace(outer=figures)

    def synchronise(self, state: DilocoState, fragment: Fragment) -> tuple[DilocoState, PseudoGradient]:
        """SEND and APPLY of a fragment at once (tau = 0)."""
        outer, figures = self._send(state, fragment)
        parameters, changed = self._apply(state.inner.parameters, outer, fragment)
        inner, outer = state.inner._replace(parameters=parameters), fragment.put(outer, changed)
        return DilocoState(inner, outer, self._forget(state.seen, fragment)), figures

    def lost(self, state: DilocoState, batch: Tree) -> Lost:
        """What quantising would lose of the replicas' differences from theta, all of them; as `Psdp.lost`."""
        del batch
        reducer = self.joint.reducer
        assert isinstance(reducer, QuantisedReducer)

        def differences(own: Tree) -> Tree:
            return jax.tree.map(jnp.subtract, state.outer.parameters, own)

        sums = vmap_over(differences, self.axis, self.layout)(state.inner.parameters)
        return reducer.measure(sums, jnp.float32(reducer.lanes), state.outer.error)

    def outer_parameters(self, state: DilocoState, due: Fragment | None = None) -> Tree:
        """The outer parameters under `params`, after the SEND that is due and not yet computed, if there is one."""
        outer = state.outer if due is None else self._send(state, due)[0]
        return self.joint.parameters(outer)

    def bytes_sent(self, step: int) -> int:
        """Bytes that a device has sent over the axis in the first `step` steps, for parameters."""
        parameters = eqx.filter(self.inner.model, is_parameter)
        total = 0
        for index in range(self.schedule.fragments):
            if fragment := Fragment.at(self.schedule, index, 0):
                part = jax.eval_shape(fragment.take, parameters)
                total += self.schedule.sends(index, step) * self.joint.reducer.bytes_sent(part)
        return total

    def trained(self, state: DilocoState) -> Tree:
        """The model with the outer parameters."""
        return self.inner.model_with(self.outer_parameters(state))

    def parameters_only(self, state: DilocoState) -> DilocoState:
        """The part of a state that `trained` needs; the rest is None."""
        outer = Outer(state.outer.parameters, None, state.outer.pending)
        return DilocoState(None, outer, None)  # type: ignore[arg-type]

    def replica(self, state: DilocoState, index: int) -> Tree:
        """The model of one replica."""

        def of_one(leaf):
            return leaf[self.axis, index] if is_named(leaf) else leaf[index]

        one = jax.tree.map(of_one, state.inner.parameters, is_leaf=is_named)
        return self.inner.model_with(self.layout.constrain(one, self.layout.params))

    def average(self, state: DilocoState) -> Tree:
        """The model with the plain average of the replicas' parameters."""
        lanes = self.layout.axis(self.axis).size
        mean = reduce_replicas(state.inner.parameters, lanes, self.outer_layout, self.axis)
        return self.inner.model_with(give_back(self.layout.constrain(mean, self.layout.opt_state), self.layout))

    @property
    def joint(self) -> ExactOuter | QuantisedOuter:
        """How the outer parameters are kept, sent and given back."""
        layout = self.outer_layout
        if not self.reduce.quantised:
            return ExactOuter(self.outer, ExactReducer(layout, self.axis))
        return QuantisedOuter(self.outer, QuantisedReducer(sending_layout(layout, self.axis), self.reduce, self.axis))

    def _send(self, state: DilocoState, fragment: Fragment) -> tuple[Outer, PseudoGradient]:
        """The outer side after the fragment's outer step, and its pseudo-gradient's figures."""
        layout, joint = self.outer_layout, self.joint
        weights = state.seen[FRAGMENT, fragment.index] * self._taking_part(fragment)
        (weight,) = joint.reducer.totals(weights)
        own, before = fragment.take(state.inner.parameters), fragment.take(state.outer)
        sent = joint.send(before, own, weights, weight)
        outer = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), sent.outer, before)
        outer = joint.placed(outer)
        norm = jnp.where(weight > 0, joint.reducer.norm(sent.gradient), 0)
        agreement = products(own, sent.parameters, sent.gradient, layout, self.axis)
        return fragment.put(state.outer, outer), PseudoGradient(norm, weights.array, *agreement)

    def _apply(self, parameters: Tree, outer: Outer, fragment: Fragment) -> tuple[Tree, Outer]:
        """Each replica's parameters with the fragment mixed with theta's, and what changed of its outer side."""
        layout = self.layout
        arrived, changed = self.joint.arrive(fragment.take(outer))
        arrived = layout.constrain(arrived, layout.params)
        keep = self._taking_part(fragment) * (self.mixing - 1) + 1  # alpha, or 1 for a replica that is left out

        def mixed(own: Tree, keep: NamedArray) -> Tree:
            return jax.tree.map(lambda own, new: keep.array * own + (1 - keep.array) * new, own, arrived)

        mixed_all = vmap_over(mixed, self.axis, layout)(fragment.take(parameters), keep)
        return layout.constrain(fragment.put(parameters, mixed_all), layout.params), changed

    def _taking_part(self, fragment: Fragment) -> NamedArray:
        """[replica] float32: 1 for a replica that takes part in this synchronisation, 0 for one that is left out."""
        Lanes = self.layout.axis(self.axis)
        if self.dropout == 0:
            return hax.ones(Lanes)
        key = jax.random.fold_in(jax.random.key(self.seed), fragment.sent)
        return hax.random.bernoulli(key, Lanes, 1 - self.dropout).astype(jnp.float32)

    def _forget(self, seen: NamedArray, fragment: Fragment | None) -> NamedArray:
        if fragment is None:
            return seen
        return NamedArray(seen.array.at[fragment.index].set(0), seen.axis_names)

    def _by_replica(self, batch: Tree) -> Tree:
        """[batch, ...] -> [replica, batch / replica, ...]; no row moves."""
        Lanes = self.layout.axis(self.axis)
        mapping = {**self.layout.compute, **self.inner.layout.compute}

        def one(leaf):
            if not is_named(leaf):
                return leaf.reshape(Lanes.size, -1, *leaf.shape[1:])
            leaf = leaf.rearrange((BATCH, ...))
            array = leaf.array.reshape(Lanes.size, -1, *leaf.array.shape[1:])
            cut = NamedArray(array, (self.axis, *leaf.axis_names))
            return self.layout.constrain(cut, mapping)

        return jax.tree.map(one, batch, is_leaf=is_named)
