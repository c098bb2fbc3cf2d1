"""The outer parameters of DiLoCo: their storage, and the operations that send and apply a fragment."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from gregale.axes.layout import EMBED, Layout, Tree, is_named, vmap_over
from gregale.communication.quantised import QuantisedReducer
from gregale.communication.reduce import ExactReducer, all_gather_params


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


def outer_step(optimizer: optax.GradientTransformation, theta: Tree, state: Tree, gradient: Tree) -> tuple[Tree, Tree]:
    """Return theta + outer(g) and the optimizer's state after the outer step, of the same part as the gradient."""
    updates, state = optimizer.update(gradient, state, theta)
    return optax.apply_updates(theta, updates), state


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
        return Sent(OuterState(*outer_step(self.optimizer, theta, outer.optimizer, gradient)), gradient, theta)

    def arrive(self, outer: OuterState) -> tuple[Tree, OuterState]:
        """Return theta of a fragment under `params`, and its changed outer state: none."""
        return self.parameters(outer), _unchanged(outer)

    def parameters(self, outer: OuterState) -> Tree:
        """Return theta under `params`: gathered over the slow axis first, so that islands send the minimum."""
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
        updates, state = self.optimizer.update(gradient, outer.optimizer, shard)
        return Sent(OuterState(theta, state, updates, error), gradient, shard)

    def arrive(self, outer: OuterState) -> tuple[Tree, OuterState]:
        layout = self.reducer.layout
        given, error = self.reducer.all_gather_params(_under_opt_state(outer.pending, layout), outer.error)
        theta = jax.tree.map(jnp.add, layout.constrain(outer.parameters, layout.params), given)
        nothing = jax.tree.map(jnp.zeros_like, outer.pending)
        return theta, OuterState(theta, _unchanged(outer.optimizer), nothing, error)

    def parameters(self, outer: OuterState) -> Tree:
        """Return theta under `params`, with the updates that no replica has applied, gathered in float32."""
        layout = self.reducer.layout
        shards = _under_opt_state((outer.parameters, outer.pending), layout)
        return layout.constrain(jax.tree.map(jnp.add, *shards), layout.params)


def sending_layout(layout: Layout, axis: str) -> Layout:
    """Return the layout of messages over `axis`: `params` splits arrays as far as `opt_state` does without it.

    With islands, each replica inside one sends its own part; they gather the parts over the faster axis.
    """
    inside = tuple(each for each in layout.mesh_axes((EMBED,), layout.opt_state) if each != axis)
    return replace(layout, params={**layout.params, EMBED: inside})


def _unchanged(tree: Tree) -> Tree:
    """Return None for every array: `Fragment.put` does not change it."""
    return jax.tree.map(lambda _: None, tree, is_leaf=is_named)


def _under_opt_state(tree: Tree, layout: Layout) -> Tree:
    return layout.constrain(tree, layout.opt_state)


def _by_replica(function, reducer: ExactReducer | QuantisedReducer):
    return vmap_over(function, reducer.axis, reducer.layout)
