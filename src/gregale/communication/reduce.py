"""The one place where `replica` is reduced, and where what was reduced is given back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import REPLICA, Layout, is_named

Tree = Any


def reduce_replicas(sums: Tree, weights: NamedArray, layout: Layout) -> Tree:
    """`(sum over replica of sums) / (sum over replica of weights)`, under the `opt_state` mapping.

    An array that `opt_state` splits over `replica` takes exactly one reduce-scatter over `replica`: a device's shard
    of the result is a slice of its own shard of the sums. Others (too small to be split) take one all-reduce.

    Arguments:
    - `sums`: named arrays with an axis `replica`, or plain arrays whose first axis is the replica; under `params`
    - `weights`: [replica]; what the sums are divided by, added up first
    """
    total = jnp.sum(weights.array)

    def one(leaf):
        if isinstance(leaf, NamedArray):
            leaf = leaf.rearrange((REPLICA, ...))
            axes = leaf.axes[1:]
            before = layout.spec(leaf.axes, layout.params)
            after = layout.spec(axes, layout.opt_state)
            return NamedArray(_reduce(leaf.array, before, after, layout) / total, tuple(axis.name for axis in axes))
        return _reduce(leaf, PartitionSpec(REPLICA), PartitionSpec(), layout) / total

    return jax.tree.map(one, sums, is_leaf=is_named)


def _reduce(array: jax.Array, before: PartitionSpec, after: PartitionSpec, layout: Layout) -> jax.Array:
    split = [dimension for dimension, axes in enumerate(after) if axes is not None and REPLICA in axes]

    def add(shard: jax.Array) -> jax.Array:
        if split:
            return jax.lax.psum_scatter(shard[0], REPLICA, scatter_dimension=split[0], tiled=True)
        return jax.lax.psum(shard[0], REPLICA)

    return jax.shard_map(add, mesh=layout.mesh, in_specs=before, out_specs=after)(array)


def give_back(reduced: Tree, layout: Layout) -> Tree:
    """What was computed under `opt_state`, under `params` again: one all-gather over `replica` an array."""
    return layout.constrain(reduced, layout.params)
