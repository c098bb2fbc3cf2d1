"""DiLoCo and Streaming DiLoCo in one mesh: replicas that train separately, their rounds, and the outer step."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import BATCH, EMBED, ISLAND, LORA_RANK, REPLICA, AxisMapping, Layout, Tree, is_named, vmap_over
from gregale.axes.parameters import buffers_of, layer_order, trainable
from gregale.codecs.codec import ReduceConfig
from gregale.communication.quantised import QuantisationLoss, QuantisedReducer
from gregale.communication.reduce import ExactReducer, all_gather_params, reduce_replicas
from gregale.cost.memory import bytes_on_device
from gregale.errors import UserError
from gregale.methods.average import AverageConfig
from gregale.methods.method import (
    Actions,
    Inspected,
    Limits,
    Method,
    Probe,
    PsdpState,
    PseudoGradientStats,
    SpikesConfig,
    StepMetrics,
    products,
)
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import (
    FRAGMENT,
    Fragment,
    Schedule,
    Traffic,
    errors_per_fragment,
    fragments_alike,
    per_fragment,
)
from gregale.optim.config import Optimizer
from gregale.optim.moments import Int8Moment, is_int8


def sync_axis(layout: Layout) -> str:
    """Return the axis whose indices are joined: `island` if the mesh has several of its indices, else `replica`."""
    return ISLAND if layout.mesh.shape[ISLAND] > 1 else REPLICA


@dataclass(frozen=True)
class Replicas:
    """The separate replicas of a method on a mesh."""

    layout: Layout  # the whole mesh
    inside: Layout  # the layout of one replica
    outer: Layout  # the layout whose `opt_state` splits over the axis too
    axis: str  # the axis of the replicas

    @property
    def SyncAxis(self) -> Axis:
        return self.layout.axis(self.axis)

    def copies(self, tree: Tree) -> Tree:
        """Turn [...] into [replica, ...]: the same for each."""
        return vmap_over(lambda _: tree, self.axis, self.layout)(hax.zeros(self.SyncAxis))

    def rows(self, batch: Tree) -> Tree:
        """Turn [batch, ...] into [replica, batch / replica, ...]; no row moves."""
        mapping = {**self.layout.compute, **self.inside.compute}

        def one(leaf):
            if not is_named(leaf):
                return leaf.reshape(self.SyncAxis.size, -1, *leaf.shape[1:])
            leaf = leaf.rearrange((BATCH, ...))
            array = leaf.array.reshape(self.SyncAxis.size, -1, *leaf.array.shape[1:])
            cut = NamedArray(array, (self.axis, *leaf.axis_names))
            return self.layout.constrain(cut, mapping)

        return jax.tree.map(one, batch, is_leaf=is_named)

    def shardings(self, state: PsdpState) -> PsdpState:
        def per_replica(tree, mapping):
            places = self.layout.shardings(tree, {**mapping, self.axis: self.axis})
            first = NamedSharding(self.layout.mesh, PartitionSpec(self.axis))
            return jax.tree.map(lambda leaf, place: place if is_named(leaf) else first, tree, places, is_leaf=is_named)

        return PsdpState(
            parameters=per_replica(state.parameters, self.inside.params),
            sharded=per_replica(state.sharded, self.inside.opt_state),
            gathered=per_replica(state.gathered, {}),
            buffers=per_replica(state.buffers, self.inside.compute),
        )

    def shardings_of_any(self, tree: Tree) -> Tree:
        """Return the shardings of arrays with or without the axis: without it, `opt_state` splits them over it too."""

        def of(leaf):
            mapping = {**self.inside.params, self.axis: self.axis}
            whole = is_named(leaf) and self.axis not in leaf.axis_names
            return self.layout.shardings(leaf, self.outer.opt_state if whole else mapping)

        return jax.tree.map(of, tree, is_leaf=is_named)

    def one(self, tree: Tree, index: int) -> Tree:
        """Turn [replica, ...] into one replica's [...] under `params`."""

        def of_one(leaf):
            return leaf[self.axis, index] if is_named(leaf) else leaf[index]

        return self.layout.constrain(jax.tree.map(of_one, tree, is_leaf=is_named), self.layout.params)

    def average(self, tree: Tree) -> Tree:
        """Turn [replica, ...] into the plain average [...] under `params`."""
        mean = reduce_replicas(tree, self.SyncAxis.size, self.outer, self.axis)
        return all_gather_params(self.layout.constrain(mean, self.layout.opt_state), self.layout)

    def joined(self, state: PsdpState, parameters: Tree) -> PsdpState:
        """Turn states [replica, ...] into one with `parameters`, and the averages of optimizer states and buffers."""
        sharded, gathered = (self._mean(part, self.layout.opt_state) for part in (state.sharded, state.gathered))
        return PsdpState(parameters, sharded, gathered, buffers=self.joined_buffers(state))

    def joined_buffers(self, state: PsdpState) -> Tree:
        """Return the average of the replicas' buffers, under `compute`."""
        return self._mean(state.buffers, self.layout.compute)

    def _mean(self, tree: Tree, mapping: AxisMapping) -> Tree:
        """Turn [replica, ...] into the average [...] under a mapping; of counters, into the first."""

        def one(leaf):
            if is_int8(leaf):
                return Int8Moment.of(one(vmap_over(Int8Moment.decoded, self.axis, self.layout)(leaf)), 0)
            array = leaf.array if is_named(leaf) else leaf
            if not jnp.issubdtype(array.dtype, jnp.floating):
                return leaf[self.axis, 0] if is_named(leaf) else leaf[0]
            return reduce_replicas(leaf, self.SyncAxis.size, self.outer, self.axis)

        means = jax.tree.map(one, tree, is_leaf=lambda node: is_int8(node) or is_named(node))
        return self.layout.constrain(means, mapping)


class PerReplicaMethod(Method):
    """A method whose replicas each make PSDP steps on their own rows of the batch, under vmap.

    - `inner`: the step of one replica; its layout is `layout.inside(axis)`
    - `layout`: the whole mesh
    """

    inner: Psdp
    layout: Layout

    @property
    def axis(self) -> str:
        """Return the axis whose indices train separately."""
        return sync_axis(self.layout)

    @property
    def step_layout(self) -> Layout:
        return self.inner.layout

    @property
    def spikes(self) -> SpikesConfig | None:
        return self.inner.spikes

    @property
    def average(self) -> AverageConfig | None:
        return self.inner.average

    def inner_steps(self, states: PsdpState, batch: Tree, limits: Limits | None) -> tuple[PsdpState, StepMetrics]:
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows."""
        given = states, self.replicas.rows(batch), *([] if limits is None else [limits])
        return vmap_over(self.inner.step, self.axis, self.layout)(*given)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def outer_layout(self) -> Layout:
        """Return the layout whose `opt_state` also splits joined parameters over the axis, as the finest split."""
        split = [name for name in (EMBED, LORA_RANK) if name == EMBED or name in self.layout.opt_state]
        of_each = {name: (*self.layout.mesh_axes((name,), self.layout.opt_state), self.axis) for name in split}
        finest = {name: tuple(dict.fromkeys(axes)) for name, axes in of_each.items()}
        return replace(self.layout, opt_state={**self.layout.opt_state, **finest})

    @property
    def replicas(self) -> Replicas:
        """Return the separate replicas."""
        return Replicas(self.layout, self.step_layout, self.outer_layout, self.axis)

    def init(self, model: Tree | None = None) -> Any:
        """Return the state before the first step, in which all replicas are equal."""
        return self.from_psdp(self.inner.init(model), 0)

    def inspected(self, state: Any, batch: Tree, probe: Probe) -> Inspected:
        own = partial(self.inner.inspected, probe=probe)
        return vmap_over(own, self.axis, self.layout)(state.inner, self.replicas.rows(batch))


def same_form(found: Tree, expected: Tree) -> bool:
    """Return whether two trees have the same structure, and arrays of the same axes, shapes and dtypes."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(jnp.shape(one) == jnp.shape(other) and one.dtype == other.dtype for one, other in pairs)


class MixingState(NamedTuple):
    """The state of a `Mixing` method between steps."""

    inner: PsdpState  # every array with a leading [replica]: parameters and optimizer state of each replica
    own: Tree = None  # the method's own state, see `Mixing.begin`


def __getattr__(name: str) -> Any:
    """Return `PerReplicaMethod` by the name that it had; the name goes with the next release."""
    if name != "Separate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Separate is PerReplicaMethod now", DeprecationWarning, stacklevel=2)
    return PerReplicaMethod


class Mixing(PerReplicaMethod, ABC):
    """A method whose replicas mix their parameters after a step.

        theta_k    = step(theta_k, rows of replica k)
        theta, own = mix(theta, own, due(t))            unless due(t) is None

    A subclass is a dataclass with the fields `inner` and `layout`, a `name`, and the methods `due`, `mix` and
    `bytes_sent`; `begin` gives it a state of its own. Evaluation, samples, export and the conversion to PSDP use
    `joined` parameters, by default the average of the replicas. Checkpoints hold these too, so that one device can
    evaluate them.
    """

    shown: ClassVar[tuple[str, ...]] = ("replica_bytes",)

    @abstractmethod
    def due(self, step: int) -> Any:
        """Return the argument of `mix` after step number `step`, a tree of arrays; None: nothing is mixed."""

    def begin(self, parameters: Tree) -> Tree:
        """Return the method's own state before the first step, from the parameters of all replicas, [replica, ...].

        Named arrays with the axis of the replicas lie with their replica, others are split as finely as `opt_state`
        splits them. A conversion to another method drops this state.
        """
        del parameters

    @abstractmethod
    def mix(self, parameters: Tree, own: Tree, due: Any) -> tuple[Tree, Tree]:
        """Return the parameters of all replicas, [replica, ...] each, and the own state, after they are mixed.

        It is compiled with the step. `self.replicas.average` averages a tree [replica, ...], and `copies` inverts it.
        """

    def joined(self, parameters: Tree, own: Tree) -> Tree:
        """Return one model's parameters [...] for all replicas' parameters [replica, ...] and the own state."""
        del own
        return self.replicas.average(parameters)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of a replica's parameters on one device, for `bytes_sent`."""
        layout = self.step_layout
        return bytes_on_device(layout.abstract(trainable(self.inner.model), layout.params))

    def from_psdp(self, start: PsdpState, step: Any) -> MixingState:
        del step
        inner = self.replicas.copies(start._replace(error=None))
        return MixingState(inner, self.begin(inner.parameters))

    def to_psdp(self, state: MixingState) -> PsdpState:
        joined = self.joined(state.inner.parameters, state.own)
        found, wanted = (jax.tree.structure(tree, is_leaf=is_named) for tree in (joined, state.inner.parameters))
        if found != wanted:
            raise UserError(f"sync.type: {type(self).__name__}.joined has to return one model's parameters.")
        return self.replicas.joined(state.inner, joined)

    def shardings(self, state: MixingState) -> MixingState:
        return MixingState(self.replicas.shardings(state.inner), self.replicas.shardings_of_any(state.own))

    def actions(self, step: int) -> Actions:
        due = self.due(step)
        if not all(
            isinstance(leaf, int | float | np.generic | np.ndarray | jax.Array) for leaf in jax.tree.leaves(due)
        ):
            raise UserError(f"sync.type: {type(self).__name__}.due has to return arrays or None; it returns {due!r}.")
        return Actions((due,))

    def step(
        self, state: MixingState, batch: Tree, due: Any = None, limits: Limits | None = None
    ) -> tuple[MixingState, StepMetrics]:
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows."""
        inner, metrics = self.inner_steps(state.inner, batch, limits)
        if due is None:
            return MixingState(inner, state.own), metrics
        given = inner.parameters, state.own
        mixed = self.mix(*given, due)
        if not (isinstance(mixed, tuple) and same_form(mixed, given)):
            raise UserError(
                f"sync.type: {type(self).__name__}.mix has to return the pair (parameters, own state), each array with "
                "the axes and the dtype that it was given with; `self.replicas.copies` turns [...] into [replica, ...]."
            )
        return MixingState(inner._replace(parameters=mixed[0]), mixed[1]), metrics

    def reset_error(self, state: MixingState) -> MixingState:
        return state

    def without_error(self, state: MixingState) -> MixingState:
        return state

    def trees(self, state: MixingState) -> dict[str, Tree]:
        found = {"parameters": state.inner.parameters, "optimizer": (state.inner.sharded, state.inner.gathered)}
        return found if state.own is None else {**found, "own": state.own}

    def eval_model(self, state: MixingState) -> Tree:
        return self.inner.eval_model(self.to_psdp(state))

    def eval_subset(self, state: MixingState) -> MixingState:
        return MixingState(self.inner.eval_subset(state.inner), state.own)

    def needs_full_state(self, step: int) -> bool:
        del step
        return True


class OuterState(NamedTuple):
    """The outer parameters and their optimizer's state, of the whole model or of a fragment."""

    parameters: Tree  # theta
    optimizer: Tree  # the outer optimizer's state, under `opt_state`
    pending: Tree = None  # quantised: updates that no replica has applied, under `opt_state`
    error: Tree = None  # quantised: the unsent rest of both phases


class Sent(NamedTuple):
    outer: OuterState  # after the outer step
    gradient: Tree  # the pseudo-gradient, under `opt_state`
    parameters: Tree  # theta before the outer step, under `opt_state`


def pseudo_gradient(theta: jax.Array, own: jax.Array) -> jax.Array:
    """Return the outer optimizer's gradient of an array: theta less `own`, of one replica or the mean of all."""
    return theta - own


class OuterStep(NamedTuple):
    """The result of an outer step, of the same part as its gradient g."""

    parameters: Tree  # theta + outer(g)
    updates: Tree  # outer(g)
    optimizer: Tree  # the optimizer's state after the step


def outer_step(optimizer: optax.GradientTransformation, theta: Tree, state: Tree, gradient: Tree) -> OuterStep:
    """Run the outer optimizer on a pseudo-gradient; the compiler removes what the caller does not use."""
    updates, state = optimizer.update(gradient, state, theta)
    return OuterStep(optax.apply_updates(theta, updates), updates, state)


@dataclass(frozen=True)
class ExactOuter:
    """theta is under `opt_state`, 1 / replicas of it on a device; replicas send and receive parameters in float32.

    SEND: g = theta - sum_k w_k theta_k / sum_k w_k;  theta += outer(g)     one reduce-scatter
    ARRIVE: theta, under `params`                                           one all-gather
    """

    optimizer: optax.GradientTransformation  # the outer optimizer
    reducer: ExactReducer  # over DiLoCo's axis; its layout's `opt_state` splits the outer parameters

    def begin(self, theta: Tree) -> OuterState:
        """Return the outer state before the first step, from parameters under `params`."""
        theta = _under_opt_state(theta, self.reducer.layout)
        return OuterState(theta, self.optimizer.init(theta))

    def shardings(self, outer: OuterState) -> OuterState:
        """Return the sharding of each array."""
        layout = self.reducer.layout
        return layout.shardings(outer, layout.opt_state)

    def placed(self, outer: OuterState) -> OuterState:
        """Inside jit: constrain each array to its sharding, so that the compiler gathers nothing unnecessarily."""
        return _under_opt_state(outer, self.reducer.layout)

    def send(self, outer: OuterState, own: Tree, weights: NamedArray, weight: jax.Array) -> Sent:
        """Run the outer step on a fragment.

        - `outer`: of the fragment, as all arguments below
        - `own`: theta_k, [replica, ...]
        - `weights`: w_k, [replica]; `weight`: their sum
        """
        theta = outer.parameters

        def weighed(own: Tree, weight: NamedArray) -> Tree:  # weight 0: none of it, even if it is not finite
            return jax.tree.map(lambda own: jnp.where(weight.array > 0, own * weight.array, 0), own)

        sums = _by_replica(weighed, self.reducer)(own, weights)
        mean, _ = self.reducer.reduce(sums, weight, None)
        gradient = jax.tree.map(pseudo_gradient, theta, mean)
        stepped = outer_step(self.optimizer, theta, outer.optimizer, gradient)
        return Sent(OuterState(stepped.parameters, stepped.optimizer), gradient, theta)

    def arrive(self, outer: OuterState) -> tuple[Tree, OuterState]:
        """Return theta of a fragment under `params`, and its changed outer state: none."""
        return self.parameters(outer), _unchanged(outer)

    def shards(self, outer: OuterState) -> Tree:
        """Return theta under `opt_state`."""
        return _under_opt_state(outer.parameters, self.reducer.layout)

    def parameters(self, outer: OuterState) -> Tree:
        """Return theta under `params`: gathered over the slow axis first, so that its messages are the smallest."""
        layout = self.reducer.layout
        shard = layout.constrain(outer.parameters, sending_layout(layout, self.reducer.axis).params)
        return all_gather_params(shard, layout)


@dataclass(frozen=True)
class QuantisedOuter:
    """Every replica holds theta; replicas send differences from it and updates of it, through codecs.

        SEND: g = sum_k w_k (theta - theta_k) / sum_k w_k;  u = outer(g)        first phase
        ARRIVE: theta += u                                                      second phase

    Differences are small and have their own scale; parameters in 4 bits would be useless. u waits under `opt_state`
    from SEND to ARRIVE, so that each phase overlaps with its own step. All replicas decode the same bytes, so theta is
    the same everywhere to the last bit.

    - `optimizer`, `reducer`: as of `ExactOuter`
    """

    optimizer: optax.GradientTransformation
    reducer: QuantisedReducer

    def begin(self, theta: Tree) -> OuterState:
        layout = self.reducer.layout
        shard = _under_opt_state(theta, layout)
        nothing = jax.tree.map(jnp.zeros_like, shard)
        theta = layout.constrain(theta, layout.params)
        return OuterState(theta, self.optimizer.init(shard), nothing)

    def shardings(self, outer: OuterState) -> OuterState:
        layout = self.reducer.layout
        theta = layout.shardings(outer.parameters, layout.params)
        optimizer, pending = layout.shardings((outer.optimizer, outer.pending), layout.opt_state)
        return OuterState(theta, optimizer, pending, self.reducer.shardings(outer.error))

    def placed(self, outer: OuterState) -> OuterState:
        layout = self.reducer.layout
        theta = layout.constrain(outer.parameters, layout.params)
        optimizer, pending = _under_opt_state((outer.optimizer, outer.pending), layout)
        return OuterState(theta, optimizer, pending, outer.error)

    def send(self, outer: OuterState, own: Tree, weights: NamedArray, weight: jax.Array) -> Sent:
        layout = self.reducer.layout
        # Constrain it before its use in shards: otherwise the compiler splits the fragment and gathers it again.
        theta = layout.constrain(outer.parameters, layout.params)

        def differences(own: Tree, weight: NamedArray) -> Tree:
            taken = jax.tree.map(lambda theta, own: jnp.where(weight.array > 0, own, theta), theta, own)
            return jax.tree.map(lambda theta, own: pseudo_gradient(theta, own) * weight.array, theta, taken)

        sums = _by_replica(differences, self.reducer)(own, weights)
        gradient, error = self.reducer.reduce(sums, weight, outer.error)
        shard = _under_opt_state(theta, layout)
        stepped = outer_step(self.optimizer, shard, outer.optimizer, gradient)
        return Sent(OuterState(theta, stepped.optimizer, stepped.updates, error), gradient, shard)

    def arrive(self, outer: OuterState) -> tuple[Tree, OuterState]:
        layout = self.reducer.layout
        given, error = self.reducer.all_gather_params(_under_opt_state(outer.pending, layout), outer.error)
        theta = jax.tree.map(jnp.add, layout.constrain(outer.parameters, layout.params), given)
        nothing = jax.tree.map(jnp.zeros_like, outer.pending)
        return theta, OuterState(theta, _unchanged(outer.optimizer), nothing, error)

    def parameters(self, outer: OuterState) -> Tree:
        """Return theta under `params`, with the updates that no replica has applied, gathered in float32."""
        return self.reducer.layout.constrain(self.shards(outer), self.reducer.layout.params)

    def shards(self, outer: OuterState) -> Tree:
        """Return theta under `opt_state`, with the updates that no replica has applied."""
        shards = _under_opt_state((outer.parameters, outer.pending), self.reducer.layout)
        return jax.tree.map(jnp.add, *shards)


def sending_layout(layout: Layout, axis: str) -> Layout:
    """Return the layout of messages over `axis`: `params` splits arrays as far as `opt_state` does without it.

    Over `island`, each replica inside sends its own part; they gather the parts over the faster axis.
    """
    return replace(layout, params={**layout.params, **without_axis(layout, axis, (EMBED, LORA_RANK))})


def without_axis(layout: Layout, axis: str, names: Iterable[str]) -> AxisMapping:
    """Return those of the names that `opt_state` has, on the mesh axes that it gives them, but for one."""
    return {
        name: tuple(each for each in layout.mesh_axes((name,), layout.opt_state) if each != axis)
        for name in names
        if name in layout.opt_state
    }


def _unchanged(tree: Tree) -> Tree:
    """Return None for every array: `Fragment.put` does not change it."""
    return jax.tree.map(lambda _: None, tree, is_leaf=is_named)


def _under_opt_state(tree: Tree, layout: Layout) -> Tree:
    return layout.constrain(tree, layout.opt_state)


def _by_replica(function, reducer: ExactReducer | QuantisedReducer):
    return vmap_over(function, reducer.axis, reducer.layout)


@dataclass(frozen=True)
class Round:
    """SEND and APPLY of a fragment (docs/diloco.md, "Algorithm").

    SEND:  g = theta_f - sum_k w_k theta_k,f / sum_k w_k;  theta_f += outer(g)     w_k: tokens of replica k
    APPLY: theta_k,f = alpha theta_k,f + (1 - alpha) theta_f
    """

    layout: Layout  # the whole mesh
    outer_layout: Layout  # of the outer parameters
    outer_store: ExactOuter | QuantisedOuter  # stores the outer parameters, sends and gathers them
    mixing: float  # alpha
    dropout: float  # probability that a replica is left out
    seed: int  # of the dropout

    @property
    def axis(self) -> str:
        """Return the axis whose indices are joined."""
        return self.outer_store.reducer.axis

    def send(
        self, outer: OuterState, own: Tree, seen: NamedArray, fragment: Fragment
    ) -> tuple[OuterState, PseudoGradientStats]:
        """Return the outer state after the fragment's outer step, and the measurements of its pseudo-gradient.

        - `outer`: the whole outer state
        - `own`: theta_k of the whole model, [replica, ...]
        - `seen`: [fragment, replica], see `DilocoState`; without a token since the last send nothing changes
        """
        after, measured = self._sent(fragment.take(outer), fragment.take(own), seen, fragment)
        return fragment.put(outer, after), measured

    def _sent(
        self, before: OuterState, own: Tree, seen: NamedArray, fragment: Fragment
    ) -> tuple[OuterState, PseudoGradientStats]:
        """Compute `send` with the fragment's parts."""
        outer_store = self.outer_store
        weights = seen[FRAGMENT, fragment.index] * self.participation_mask(fragment)
        (weight,) = outer_store.reducer.all_reduce_scalars(weights)
        sent = outer_store.send(before, own, weights, weight)
        after = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), sent.outer, before)
        norm = jnp.where(weight > 0, outer_store.reducer.norm(sent.gradient), 0)
        agreement = products(own, sent.parameters, sent.gradient, self.outer_layout, self.axis)
        return outer_store.placed(after), PseudoGradientStats(norm, weights.array, *agreement)

    def send_all(
        self, schedule: Schedule, outer: OuterState, own: Tree, seen: NamedArray, step: jax.Array
    ) -> OuterState:
        """Return the outer state after a SEND of all fragments after `step` steps; one on its way arrives first.

        `step` is an int32 scalar of the device.
        """
        at = jnp.asarray([schedule.offset(fragment) for fragment in range(schedule.fragments)])
        since = (step - at) % schedule.period  # [fragment]: steps since its last SEND
        on_its_way = (since > 0) & (since < jnp.minimum(schedule.delay, step))
        alike = fragments_alike(schedule)

        def sent(outer: OuterState, each: tuple) -> tuple[OuterState, None]:
            index, rows = each
            fragment = Fragment(index, step, rows, whole=schedule.fragments == 1)
            part, mine = fragment.take(outer), fragment.take(own)
            if schedule.delay > 1:
                before = replace(fragment, sent=step - since[index])
                arrive, stay = lambda: self._arrived(mine, part, before), lambda: (mine, part)
                mine, part = jax.lax.cond(on_its_way[index], arrive, stay)
            return fragment.put(outer, self._sent(part, mine, seen, fragment)[0]), None

        for kind, rows in enumerate(alike.rows):
            numbers = np.flatnonzero(alike.kind == kind)
            own_rows = jax.tree.map(lambda of_each, numbers=numbers: of_each[numbers], rows)
            outer, _ = jax.lax.scan(sent, outer, (numbers.astype(np.int32), own_rows))
        return outer

    def apply(self, parameters: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Return each replica's parameters mixed with theta's fragment, and the changes of its outer state."""
        mixed, changed = self._mixed(fragment.take(parameters), fragment.take(outer), fragment)
        return self.layout.constrain(fragment.put(parameters, mixed), self.layout.params), changed

    def _mixed(self, own: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Compute `apply` with the fragment's parts."""
        layout = self.layout
        arrived, changed = self.outer_store.arrive(outer)
        arrived = layout.constrain(arrived, layout.params)
        keep = self.participation_mask(fragment) * (self.mixing - 1) + 1  # alpha, or 1 for a replica that is left out

        def mixed(own: Tree, keep: NamedArray) -> Tree:
            return mixed_with(own, arrived, keep.array)

        return vmap_over(mixed, self.axis, layout)(own, keep), changed

    def _arrived(self, own: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Return the fragment's parts after its APPLY."""
        mixed, changed = self._mixed(own, outer, fragment)
        return mixed, jax.tree.map(lambda old, new: old if new is None else new, outer, changed, is_leaf=is_named)

    def participation_mask(self, fragment: Fragment) -> NamedArray:
        """Return 1 for each replica in this synchronisation, 0 for one that is left out, [replica] float32."""
        SyncAxis = self.layout.axis(self.axis)
        if self.dropout == 0:
            return hax.ones(SyncAxis)
        key = jax.random.fold_in(jax.random.key(self.seed), fragment.sent)
        return hax.random.bernoulli(key, SyncAxis, 1 - self.dropout).astype(jnp.float32)


def mixed_with(own: Tree, arrived: Tree, keep: jax.Array) -> Tree:
    """Return keep own + (1 - keep) arrived: the next parameters of a replica.

    With keep 0 it is `arrived`, even if `own` is not finite.
    """
    return jax.tree.map(lambda own, new: jnp.where(keep == 0, new, keep * own + (1 - keep) * new), own, arrived)


def reset_tokens(seen: NamedArray, fragment: Fragment | None) -> NamedArray:
    """Return `seen` with zero tokens for a fragment that was sent."""
    if fragment is None:
        return seen
    return NamedArray(seen.array.at[fragment.index].set(0), seen.axis_names)


class DilocoState(NamedTuple):
    """The state of DiLoCo between steps."""

    inner: PsdpState  # every array with a leading [replica]: parameters and optimizer state of each replica
    outer: OuterState  # the outer parameters, and their optimizer's state
    seen: NamedArray  # [fragment, replica] float32: weight of the tokens since the fragment was last sent
    step: Any  # int32 scalar: steps done, which determine the fragment to send


@dataclass(frozen=True)
class Diloco(PerReplicaMethod):
    """DiLoCo on any Equinox module and loss (docs/diloco.md, "Algorithm").

    Each replica k makes the steps of `inner`, a PSDP step on its own rows of the batch, under vmap: nothing crosses
    the axis. After H steps, for each fragment f at its own offset,

        g            = theta_f - sum_k w_k theta_k,f / sum_k w_k          # SEND; w_k: tokens of replica k
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
    - `mixing`: alpha, the weight of a replica's own parameters when a fragment is applied
    - `dropout`: probability that a fragment's synchronisation leaves a replica out, which continues from its own
      parameters
    - `seed`: of the dropout
    - `reduce`: the codecs of messages over the axis: pseudo-gradients in the first phase, outer updates in the second
    - `evaluate`: the parameters to evaluate: `outer`, `average` or `first_replica`
    """

    inner: Psdp
    outer: optax.GradientTransformation
    layout: Layout
    schedule: Schedule
    mixing: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    reduce: ReduceConfig = field(default=ReduceConfig())
    evaluate: str = "outer"

    name: ClassVar[str] = "diloco"
    shown: ClassVar[tuple[str, ...]] = ("replica_bytes", "steps_since_sync")

    @staticmethod
    def of(
        model: Tree,
        loss: Callable[[Any, Tree], tuple[jax.Array, jax.Array]],
        inner: optax.GradientTransformation,
        outer: optax.GradientTransformation,
        layout: Layout,
        schedule: Schedule,
        mixing: float = 0.0,
    ) -> "Diloco":
        """Return DiLoCo of any model and loss, with optax transformations that may work on shards.

        - `model`, `loss`: as for `Psdp`
        - `inner`: each replica's optimizer
        - `outer`, `layout`, `schedule`, `mixing`: as for the class

        Raises `UserError` if the schedule and the model have different numbers of layers.
        """
        layers = len(layer_order(model))
        if schedule.fragments > 1 and schedule.layers != layers:
            raise UserError(
                f"the schedule is for {schedule.layers} layers, but the model's arrays are stacked over {layers} on "
                f"the axis `layers`: Schedule(..., layers={layers}) would fit it."
            )
        step = Psdp(model, loss, Optimizer.of(inner), layout.inside(sync_axis(layout)))
        return Diloco(step, outer, layout, schedule, mixing)

    def from_psdp(self, start: PsdpState, step: Any = 0) -> DilocoState:
        """Return the state in which every replica continues from a PSDP state after `step` steps."""
        SyncAxis, fragments = self.layout.axis(self.axis), self.schedule.fragments
        start = start._replace(error=None)  # averages inside a replica are not quantised
        inner = self.replicas.copies(start)
        outer = self.outer_store.begin(start.parameters)
        outer = outer._replace(optimizer=per_fragment(self.outer, outer.optimizer, fragments))
        seen = hax.zeros((hax.Axis(FRAGMENT, fragments), SyncAxis))
        return self.reset_error(DilocoState(inner, outer, seen, jnp.full((), step, jnp.int32)))

    def reset_error(self, state: DilocoState) -> DilocoState:
        error = self.outer_store.reducer.init(state.outer.parameters)
        error = errors_per_fragment(error, self.schedule.fragments)
        return state._replace(outer=state.outer._replace(error=error))

    def without_error(self, state: DilocoState) -> DilocoState:
        return state._replace(outer=state.outer._replace(error=None))

    def to_psdp(self, state: DilocoState) -> PsdpState:
        """Return the PSDP state of the outer parameters, with averages of the replicas' optimizer states and buffers.

        It has no error of quantised averages; `Psdp.reset_error` adds one.
        """
        return self.replicas.joined(state.inner, self.outer_parameters(state))

    def shardings(self, state: DilocoState) -> DilocoState:
        seen = self.layout.shardings(state.seen, {self.axis: self.axis})
        inner, outer = self.replicas.shardings(state.inner), self.outer_store.shardings(state.outer)
        return DilocoState(inner, outer, seen, NamedSharding(self.layout.mesh, PartitionSpec()))

    def actions(self, step: int) -> Actions:
        schedule, due = self.schedule, self.schedule.fragments_at(step)
        if schedule.delay == 0:
            return Actions((None, None), Fragment.at(schedule, due.send, step))
        send = Fragment.at(schedule, due.send, step - 1)
        apply = Fragment.at(schedule, due.apply, step - schedule.delay)
        return Actions((send, apply))

    def step(
        self,
        state: DilocoState,
        batch: Tree,
        send: Fragment | None = None,
        apply: Fragment | None = None,
        limits: Limits | None = None,
    ):
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows.

        - `send`: the fragment that was due after the step before; it is read from the input `state`
        - `apply`: the fragment that is due after this step
        """
        outer, measured = state.outer, None
        if send is not None:
            outer, measured = self.round.send(state.outer, state.inner.parameters, state.seen, send)
        # Read a fragment that was sent earlier from the input state, so that it waits for no send.
        arriving = outer if self.schedule.delay == 1 else state.outer
        inner, metrics = self.inner_steps(state.inner, batch, limits)
        if apply is not None:
            parameters, changed = self.round.apply(inner.parameters, arriving, apply)
            inner, outer = inner._replace(parameters=parameters), apply.put(outer, changed)
        seen = reset_tokens(state.seen, send) + NamedArray(metrics.weight, (self.axis,))
        return DilocoState(inner, outer, seen, state.step + 1), metrics._replace(outer=measured)

    def synchronise(self, state: DilocoState, after: Fragment) -> tuple[DilocoState, PseudoGradientStats]:
        """Run SEND and APPLY of a fragment at once (tau = 0)."""
        outer, measured = self.round.send(state.outer, state.inner.parameters, state.seen, after)
        parameters, changed = self.round.apply(state.inner.parameters, outer, after)
        inner, outer = state.inner._replace(parameters=parameters), after.put(outer, changed)
        return DilocoState(inner, outer, reset_tokens(state.seen, after), state.step), measured

    def quantisation_loss(self, state: DilocoState, batch: Tree) -> QuantisationLoss:
        """Return the quantisation loss of the replicas' differences from theta, all of them; as that of `Psdp`."""
        del batch
        reducer = self.outer_store.reducer
        assert reducer.quantised is True

        def differences(own: Tree) -> Tree:
            return jax.tree.map(pseudo_gradient, state.outer.parameters, own)

        sums = vmap_over(differences, self.axis, self.layout)(state.inner.parameters)
        return reducer.measure(sums, jnp.float32(reducer.lanes), state.outer.error)

    def outer_parameters(self, state: DilocoState) -> Tree:
        """Return theta under `params` after a synchronisation of all fragments, which the state does not have.

        So every step up to the state's counts, in whatever reads it. A state of `eval_subset` is synchronised already.
        """
        outer = state.outer
        if state.inner is not None:
            outer = self.round.send_all(self.schedule, outer, state.inner.parameters, state.seen, state.step)
        return self.outer_store.parameters(outer)

    def averaged_parameters(self, state: DilocoState) -> Tree:
        return self.outer_store.shards(state.outer)

    def bytes_sent(self, step: int) -> int:
        """Return the bytes that a device has sent over the axis in the first `step` steps, for parameters."""
        parameters = trainable(self.inner.model)
        total = 0
        for index in range(self.schedule.fragments):
            if fragment := Fragment.at(self.schedule, index, 0):
                part = jax.eval_shape(fragment.take, parameters)
                total += self.schedule.sends(index, step) * self.outer_store.reducer.bytes_sent(part)
        return total

    def metrics(self, step: int) -> dict[str, int]:
        return {"steps_since_sync": step - self.schedule.last_sent(step)}

    def trees(self, state: DilocoState) -> dict[str, Tree]:
        inner, outer = state.inner, state.outer
        return {
            "parameters": inner.parameters,
            "optimizer": (inner.sharded, inner.gathered),
            "outer_parameters": outer.parameters,
            "outer_optimizer": outer.optimizer,
        }

    def traffic(self) -> Traffic:
        return Traffic.of_schedule(self.schedule, self.outer_store.reducer, trainable(self.inner.model))

    def eval_model(self, state: DilocoState) -> Tree:
        """Return the model to evaluate: with the outer parameters, the plain average, or the first replica's."""
        if self.evaluate == "first_replica":
            return self.replica(state, 0)
        if self.evaluate == "average":
            parameters = self.replicas.average(state.inner.parameters)
        else:
            parameters = self.outer_parameters(state)
        buffers = None if state.inner is None else self.replicas.joined_buffers(state.inner)
        return self.inner.model_with(parameters, buffers)

    def eval_subset(self, state: DilocoState) -> DilocoState:
        if self.evaluate != "outer":
            return DilocoState(self.inner.eval_subset(state.inner), None, None, None)  # type: ignore[arg-type]
        outer = OuterState(state.outer.parameters, None, state.outer.pending)
        return DilocoState(None, outer, None, None)  # type: ignore[arg-type]

    def needs_full_state(self, step: int) -> bool:
        """Return whether replicas have buffers, or steps that the outer parameters of `eval_subset` lack."""
        schedule = self.schedule
        is_joined = schedule.fragments == 1 and schedule.delay == 0 and schedule.sent(step) is not None
        return not is_joined or buffers_of(self.inner.model) is not None

    def replica(self, state: DilocoState, index: int) -> Tree:
        inner = state.inner
        return self.inner.model_with(*(self.replicas.one(tree, index) for tree in (inner.parameters, inner.buffers)))

    @property
    def outer_layout(self) -> Layout:
        """Return the layout of the joined parameters; with one phase `opt_state` does not split them over the axis."""
        layout = super().outer_layout
        if self.reduce.phases == 2:
            return layout
        return replace(layout, opt_state=without_axis(layout, self.axis, layout.opt_state))

    @property
    def round(self) -> Round:
        """Return the operations that send and apply a fragment."""
        return Round(self.layout, self.outer_layout, self.outer_store, self.mixing, self.dropout, self.seed)

    @property
    def outer_store(self) -> ExactOuter | QuantisedOuter:
        """Return the store of the outer parameters, which also sends them."""
        layout = self.outer_layout
        if not self.reduce.quantised:
            return ExactOuter(self.outer, ExactReducer(layout, self.axis))
        return QuantisedOuter(self.outer, QuantisedReducer(sending_layout(layout, self.axis), self.reduce, self.axis))
