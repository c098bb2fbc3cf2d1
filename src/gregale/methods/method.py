"""The interface of methods, and what their steps share: the guard against spikes, inspection, agreement of replicas."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import Layout, Tree, is_layers, is_named
from gregale.communication.reduce import further_splits, own_part
from gregale.errors import UserError
from gregale.methods.average import AverageConfig
from gregale.methods.schedule import Traffic
from gregale.settings import Settings, above, setting, whole


@dataclass(frozen=True)
class SpikesConfig(Settings):
    """A step whose loss or gradient norm is above mean + sigma * standard deviation of the window changes nothing.

    The window has the finite values of the last steps, spikes too: after a lasting rise steps count again.
    """

    window: int = setting(128, "steps", range=whole(2, 100_000), aliases=("rolling_interval_length",), by_topic=True)
    sigma: float = setting(6.0, "standard deviations", range=above(0), aliases=("sigma_factor",), by_topic=True)


class Limits(NamedTuple):
    """The largest values of a step that is no spike, float32, of each replica that makes its own steps."""

    loss: Any
    norm: Any


class SpikeWindow(NamedTuple):
    """The values of the last steps with finite ones, and the number of spikes, of each replica that decides itself."""

    losses: Any  # float32 [*replica_axes, window]
    norms: Any  # float32 [*replica_axes, window]
    seen: Any  # int32 [*replica_axes]: values so far
    spikes: Any  # int32 [*replica_axes]

    @staticmethod
    def empty(config: SpikesConfig, axes: tuple[int, ...]) -> "SpikeWindow":
        values, counts = jnp.zeros((*axes, config.window), jnp.float32), jnp.zeros(axes, jnp.int32)
        return SpikeWindow(values, values, counts, counts)

    def limits(self, sigma: float) -> Limits:
        """Return the limits of the next step; infinite ones until the window is full."""
        full = self.seen >= self.losses.shape[-1]

        def limit(values: jax.Array) -> jax.Array:
            return jnp.where(full, values.mean(-1) + sigma * values.std(-1), jnp.inf)

        return Limits(limit(self.losses), limit(self.norms))

    def after(self, loss: jax.Array, norm: jax.Array, finite: jax.Array, spike: jax.Array) -> "SpikeWindow":
        """Return the window after a step."""
        size = self.losses.shape[-1]
        here = (jnp.arange(size) == (self.seen % size)[..., None]) & finite[..., None]

        def put(values: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(here, value[..., None], values)

        losses, norms = put(self.losses, loss), put(self.norms, norm)
        return SpikeWindow(losses, norms, self.seen + finite, self.spikes + spike)


Probe = Callable[[Tree, Tree], Tree]
"""probe(model, batch) -> named arrays: what else is looked at, of the model and the batch that a step computes with."""


class Inspected(NamedTuple):
    """Sums of squares, in float32, of a step's values: trees like the parameters, of [layers] or scalars.

    If replicas train separately, each array has a leading [replica].
    """

    parameters: Tree  # before the step
    gradients: Tree  # averaged, before clipping
    updates: Tree  # parameters after the step less those before
    probed: Tree  # the result of the probe


def inspected(before: Tree, gradients: Tree, after: Tree, probed: Tree) -> Inspected:
    """Return the sums for parameters before and after a step, and its averaged gradients."""

    def update(new: jax.Array, old: jax.Array) -> jax.Array:
        return new.astype(jnp.float32) - old.astype(jnp.float32)

    return Inspected(squares(before), squares(gradients), squares(jax.tree.map(update, after, before)), probed)


def squares(tree: Tree) -> Tree:
    """Return the sum of squares of each array, over all axes but `layers`."""

    def one(leaf) -> NamedArray:
        names = leaf.axis_names if is_named(leaf) else ()
        array = leaf.array if is_named(leaf) else leaf
        over = tuple(place for place in range(array.ndim) if not any(map(is_layers, names[place : place + 1])))
        return NamedArray(jnp.sum(jnp.square(array.astype(jnp.float32)), axis=over), tuple(filter(is_layers, names)))

    return jax.tree.map(one, tree, is_leaf=is_named)


class StepMetrics(NamedTuple):
    """The metrics of a step: scalars, or [replica] if each replica makes its own step."""

    loss: Any  # float32: sum of losses / sum of weights, over the whole batch
    weight: Any  # float32: sum of weights, the tokens that counted
    grad_norm: Any  # float32: global norm of the averaged gradient, before clipping
    finite: Any  # bool: whether loss and gradient were finite; if not, the step changed nothing
    outer: Any = None  # the `PseudoGradientStats` that was sent, if one was
    named: Any = None  # float32, by name: auxiliary terms and metrics of `Losses`, each over the sum of weights
    callbacks: Any = None  # float32, by name: the metrics of callbacks
    spike: Any = None  # bool: whether the step changed nothing as a spike; None: spikes are no matter


class Actions(NamedTuple):
    """The actions of a step beside its update."""

    step_args: tuple = ()  # further arguments of the compiled step
    post_step: Any = None  # argument of the compiled `synchronise` after the step; None: no `synchronise`

    @property
    def during(self) -> tuple:
        """Return `step_args`, whose name this was; it goes with the next release."""
        warnings.warn("Actions.during is Actions.step_args now", DeprecationWarning, stacklevel=2)
        return self.step_args


class PsdpState(NamedTuple):
    """The state of PSDP between steps, and the form that converts one method's state to another's."""

    parameters: Tree  # under `params`
    sharded: Tree  # the optimizer's state, under `opt_state`
    gathered: Tree  # the state of the optimizer's second part: scalars
    error: Tree = None  # the unsent rest of quantised averages; None if averages are exact
    buffers: Tree = None  # the model's buffers, under `compute`; None if it has none


class Method(ABC):
    """A synchronisation method: the trees that carry `replica`, and the steps at which it is reduced.

    Its own code is that of a method whose replicas make every step together, with nothing beside the update.

    A state is the method's own tree of arrays; programs pass it on and never read it. Methods that compute with states
    are called under `jax.jit`; those that take the number of a step, counted from 1, are plain Python.
    """

    name: ClassVar[str]  # as checkpoints record it
    shown: ClassVar[tuple[str, ...]] = ()  # the metrics of its traffic in a progress line
    layout: Layout  # the whole mesh and the mappings
    step: Callable[..., tuple[Tree, StepMetrics]]
    """step(state, batch, *during): one step on a batch; `during` is from `actions`.

    With `spikes` it has an argument `limits` too, `gregale.methods.method.Limits`.
    """

    @property
    def spikes(self) -> SpikesConfig | None:
        """Return the rule of the steps that it leaves out as spikes; None: it leaves out none."""
        return None

    @property
    def average(self) -> AverageConfig | None:
        """Return the average of the parameters that a run keeps; None: it keeps none."""
        return None

    @property
    def outer_layout(self) -> Layout:
        """Return the layout whose `opt_state` splits the parameters of the run the furthest."""
        return self.layout

    def averaged_parameters(self, state: Tree) -> Tree:
        """Return the parameters of which `average` is one, under `opt_state` of `outer_layout`; nothing is sent for it.

        With replicas that train separately they are those after the last outer step.
        """
        del state
        raise TypeError(f"{type(self).__name__} has no parameters of all replicas to average")

    @property
    def step_layout(self) -> Layout:
        """Return the layout of one step: all of it, or one replica's part."""
        return self.layout

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Return the axes of the step's metrics: none, or the one whose indices make their own steps."""
        return ()

    def frozen(self, model: Tree) -> Tree:
        """Return the weights of a model before the first step that nothing trains; None: it has none.

        They are those beside adapters, or the copy with which an objective compares.
        """
        return self.inner.frozen(model)  # type: ignore

    def holding(self, frozen: Tree) -> Self:
        """Return the method with these values of the frozen weights, under `params`; None: it has none.

        The weights are shared by all replicas, and belong to no state of a method.
        """
        return self if frozen is None else replace(self, inner=self.inner.holding(frozen))  # type: ignore

    # A step.

    @abstractmethod
    def init(self, model: Tree | None = None) -> Tree:
        """Return the state before the first step, from the arrays of a model (default: the method's own)."""

    @abstractmethod
    def shardings(self, state: Tree) -> Tree:
        """Return the sharding of each array of a state."""

    def actions(self, step: int) -> Actions:
        """Return the actions of step number `step` beside its update."""
        del step
        return Actions()

    def synchronise(self, state: Tree, after: Any) -> tuple[Tree, Any]:
        """Return the state, and the metrics' `outer`, after a step for which `actions` has an `after`."""
        del after
        return state, None

    # From one method to another.

    @abstractmethod
    def from_psdp(self, start: PsdpState, step: Any) -> Tree:
        """Return the state that continues from a PSDP state after `step` steps, with a zero error."""

    @abstractmethod
    def to_psdp(self, state: Tree) -> PsdpState:
        """Return the PSDP state that continues from a state, without an error of quantised averages."""

    @abstractmethod
    def reset_error(self, state: Tree) -> Tree:
        """Return a state of any mesh and codec with a zero error of quantised averages."""

    @abstractmethod
    def without_error(self, state: Tree) -> Tree:
        """Return a state without the errors of quantised averages, whose shapes depend on the mesh."""

    # Models for evaluation, sampling and export.

    @abstractmethod
    def eval_model(self, state: Tree) -> Tree:
        """Return the model to evaluate."""

    @abstractmethod
    def eval_subset(self, state: Tree) -> Tree:
        """Return the part of a state that `eval_model` needs unless `needs_full_state`; the rest is None."""

    def needs_full_state(self, step: int) -> bool:
        """Return whether the parameters of `to_psdp` depend on more than `eval_subset` after `step` steps.

        A checkpoint then holds them too, so that one device can evaluate it.
        """
        del step
        return False

    # Metrics, and estimates for `gregale plan`.

    @abstractmethod
    def bytes_sent(self, step: int) -> int:
        """Return a device's bytes over the slow axis in the first `step` steps, for parameters."""

    def metrics(self, step: int) -> dict[str, int]:
        """Return further metrics after `step` steps: `steps_since_sync` if replicas train separately."""
        del step
        return {}

    @abstractmethod
    def inspected(self, state: Tree, batch: Tree, probe: Probe) -> Inspected:
        """Return the next step's values, in a separate program; `probe` is for the layout `step_layout`."""

    @abstractmethod
    def trees(self, state: Tree) -> dict[str, Tree]:
        """Return the trees of a state by name: `parameters`, `optimizer`, and the method's own."""

    def traffic(self) -> Traffic | None:
        """Return the method's kinds of steps and its traffic; None: `plan` compiles the first steps to know them."""
        return None

    def quantisation_loss(self, state: Tree, batch: Tree) -> Any:
        """Return the quantisation loss, a `communication.quantised.QuantisationLoss`; only with a codec.

        Raises `UserError` for a method without codecs.
        """
        raise UserError(f"reduce.measure is true, but the method {self.name} uses no codec. Leave reduce.measure out.")


class PseudoGradientStats(NamedTuple):
    """Measurements of a fragment's pseudo-gradient g = sum_k p_k g_k, with g_k = theta - theta_k, when it is sent.

    Each replica k has only its shard S_k of theta's coordinates, 1 / R of them. For S_k it has g_k and g, so that these
    sums need no transfer over the axis. An array that is not split over the axis is in every shard.
    """

    norm: Any  # float32 scalar: |g|
    weight: Any  # float32 [replica]: w_k, 0 for a replica that is left out; p_k = w_k / sum_j w_j
    square: Any  # float32 [replica]: |g_k|^2 on S_k, in units of all coordinates
    product: Any  # float32 [replica]: <g_k, g> on S_k, likewise


def products(own: Tree, theta: Tree, gradient: Tree, layout: Layout, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return `square` and `product` of a `PseudoGradientStats`; nothing crosses `axis`.

    - `own`: theta_k, with a leading [replica]; under `params`
    - `theta`, `gradient`: theta and g; under `opt_state`
    - `axis`: the name of the leading axis
    """

    def one(theta, own, gradient):
        if not isinstance(theta, NamedArray):
            return _products(own, theta, gradient, (), layout, axis)
        names = tuple(each.name for each in theta.axes)
        own, gradient = own.rearrange((axis, *names)), gradient.rearrange(names)
        return _products(own.array, theta.array, gradient.array, names, layout, axis)

    found = jax.tree.map(one, theta, own, gradient, is_leaf=is_named)
    squares, crossed = zip(*jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, tuple)), strict=True)
    return sum(squares), sum(crossed)  # type: ignore[return-value]


def _products(own, theta, gradient, names: tuple[str, ...], layout: Layout, axis: str) -> tuple[jax.Array, jax.Array]:
    """Turn [axis, *names] under `params` and twice [*names] under `opt_state` into [axis] and [axis]."""
    cuts = further_splits(names, layout)
    split = layout.mesh_axes(names, layout.opt_state)
    inside = tuple(mesh_axis for mesh_axis in split if mesh_axis != axis)
    share, each = layout.parts(axis) if axis in split else 1, layout.per_device(axis)

    def part_of(array: jax.Array, index: jax.Array) -> jax.Array:
        """Return the part of a device's shard under `opt_state` that belongs to one of its replicas."""
        if each == 1 or axis not in split:
            return array
        place = next(dimension for dimension, mesh_axes in enumerate(cuts) if axis in mesh_axes)
        size = array.shape[place] // each
        return jax.lax.dynamic_slice_in_dim(array, index * size, size, place)

    def multiply(own: jax.Array, theta: jax.Array, gradient: jax.Array):
        def of_one(own: jax.Array, index: jax.Array) -> jax.Array:
            for dimension, mesh_axes in enumerate(cuts):
                for mesh_axis in mesh_axes:
                    own = own_part(own, dimension, mesh_axis)
            mine, gradients = part_of(theta - own, index), part_of(gradient, index)
            return share * jnp.stack([jnp.sum(mine * mine), jnp.sum(mine * gradients)])

        sums = jax.vmap(of_one, out_axes=1)(own, jnp.arange(each))
        square, product = jax.lax.psum(sums, inside) if inside else sums
        return square, product

    before, after = (layout.spec(names, mapping) for mapping in (layout.params, layout.opt_state))
    replica = PartitionSpec(axis)
    mapped = layout.shard_map(multiply, (PartitionSpec(axis, *before), after, after), (replica, replica))
    return mapped(own, theta, gradient)


def cosine(measured: PseudoGradientStats) -> float | None:
    """Return the mean cosine similarity of the replicas' pseudo-gradients; None if fewer than two of them moved.

    It is the mean over all pairs, weighted by p_k and lengths (the first form). It needs only sums of single replicas
    (the second):

        cosine = sum_{j != k} p_j p_k <g_j, g_k> / sum_{j != k} p_j p_k |g_j| |g_k|
               = sum_k p_k (<g_k, g> - p_k |g_k|^2) / ((sum_k p_k |g_k|)^2 - sum_k p_k^2 |g_k|^2)

    where the values of k are those on S_k. So for arrays that are split over the replicas it is an estimate, from 1 / R
    of each replica's coordinates (the inner product is exact for two replicas); otherwise it is exact.
    """
    weight, square, product = (np.asarray(each, np.float64) for each in measured[1:])
    if not (weight.sum() > 0 and np.isfinite([square, product]).all()):
        return None
    share, length = weight / weight.sum(), np.sqrt(square)
    lengths = np.sum(share * length) ** 2 - np.sum((share * length) ** 2)
    if lengths <= 1e-12 * np.sum(square):  # no pair, up to the rounding of the difference
        return None
    return float(np.sum(share * (product - share * square)) / lengths)
