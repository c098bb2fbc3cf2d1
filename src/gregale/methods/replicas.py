"""Trees with a leading axis of replicas that train separately: create, cut, shard, average and select them."""

from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import BATCH, ISLAND, REPLICA, AxisMapping, Layout, Tree, is_named, vmap_over
from gregale.communication.reduce import all_gather_params, reduce_replicas
from gregale.methods.method import PsdpState


def sync_axis(layout: Layout) -> str:
    """Return the axis whose indices are joined: `island` if there are several islands, else `replica`."""
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
            array = leaf.array if is_named(leaf) else leaf
            if not jnp.issubdtype(array.dtype, jnp.floating):
                return leaf[self.axis, 0] if is_named(leaf) else leaf[0]
            return reduce_replicas(leaf, self.SyncAxis.size, self.outer, self.axis)

        return self.layout.constrain(jax.tree.map(one, tree, is_leaf=is_named), mapping)
