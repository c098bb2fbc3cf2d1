"""The reduction of exact values over `replica` (or `island`, above it), and the gather of the updated parameters.

`quantised` has the same methods for values of few bits. No other module reduces over `replica`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.gather import own_part
from gregale.axes.layout import REPLICA, Layout, Tree, is_named
from gregale.optim.clipping import global_norm


@dataclass(frozen=True)
class ExactReducer:
    """Averages a tree over `axis` in float32 and gathers the updates computed from the averages.

    A method calls `reduce` and `all_gather_params` once a step each, and passes the error of one call to the next. Here
    the error is None; `communication.quantised.QuantisedReducer`, with the same methods, returns the unsent rest.
    """

    layout: Layout
    axis: str = REPLICA

    def init(self, tree: Tree) -> None:
        """Return the error before the first step, for a tree of arrays without the axis."""

    def shardings(self, error: None) -> None:
        """Return the sharding of each array of an error."""

    def totals(self, *arrays: NamedArray) -> list[jax.Array]:
        """Return sums over the axis of [replica, ...] arrays, whole on each device: weights, losses, statistics."""
        return [_sum_over(array.array, self.axis, (), self.layout) for array in arrays]

    def reduce(self, sums: Tree, weight: jax.Array, error: None) -> tuple[Tree, None]:
        return reduce_replicas(sums, weight, self.layout, self.axis), error

    def all_gather_params(self, reduced: Tree, error: None) -> tuple[Tree, None]:
        """Gather values from `opt_state` to `params`: one all-gather over `axis` per array."""
        return all_gather_params(reduced, self.layout), error

    def norm(self, reduced: Tree) -> jax.Array:
        """Return the L2 norm of a tree under `opt_state`."""
        return global_norm(reduced)

    def bytes_sent(self, tree: Tree) -> int:
        """Return the bytes that a device sends over `axis` to reduce and gather a tree, without totals and norm.

        2 (n - 1) / n of its float32 shard, on n replicas.

        - `tree`: named or plain arrays without the axis, or their abstract forms
        """
        layout, n, total = self.layout, self.layout.axis(self.axis).size, 0
        for leaf in jax.tree.leaves(tree, is_leaf=is_named):
            axes = leaf.axes if isinstance(leaf, NamedArray) else ()
            finest = {*layout.mesh_axes(axes, layout.params), *layout.mesh_axes(axes, layout.opt_state)}
            total += 4 * leaf.size // prod(layout.mesh.shape[name] for name in finest - {self.axis})
        return 2 * (n - 1) * total // n


def reduce_replicas(sums: Tree, weight: jax.Array | int, layout: Layout, axis: str = REPLICA) -> Tree:
    """Return `(sum over replica of sums) / weight`, under the `opt_state` mapping.

    An array that `opt_state` splits over `replica` takes exactly one reduce-scatter over `replica`: a device's shard
    of the result is a slice of its own shard of the sums. Others (too small to be split) take one all-reduce.

    - `sums`: named arrays with an axis `replica`, or plain arrays whose first axis is the replica; under `params`
    - `weight`: scalar, the total of all replicas
    - `axis`: the axis to reduce, by default `replica`
    """

    def one(leaf):
        if not isinstance(leaf, NamedArray):
            return _sum_over(leaf, axis, (), layout) / weight
        leaf = leaf.rearrange((axis, ...))
        names = tuple(each.name for each in leaf.axes[1:])
        return NamedArray(_sum_over(leaf.array, axis, names, layout) / weight, names)

    return jax.tree.map(one, sums, is_leaf=is_named)


def _sum_over(array: jax.Array, axis: str, names: tuple[str, ...], layout: Layout) -> jax.Array:
    """Sum [axis, *names] under `params` over the first axis to [*names] under `opt_state`."""
    if axis not in layout.params:
        return array[0]
    cuts = further_splits(names, layout)

    def add(shard: jax.Array) -> jax.Array:
        shard, summed = shard[0], False
        for dimension, mesh_axes in enumerate(cuts):
            for mesh_axis in mesh_axes:
                if mesh_axis == axis:
                    shard, summed = _scattered(shard, dimension, axis), True
                else:
                    shard = own_part(shard, dimension, mesh_axis)
        return shard if summed else jax.lax.psum(shard, axis)

    before = PartitionSpec(axis, *layout.spec(names, layout.params))
    after = layout.spec(names, layout.opt_state)
    return layout.shard_map(add, before, after)(array)


def _scattered(shard: jax.Array, dimension: int, axis: str) -> jax.Array:
    """Inside `shard_map`: sum over a mesh axis and return a device's part of a dimension.

    That dimension is sent as the first: if a part of it is the last, the TPU compiler pads it to 128 values.
    """
    return jnp.moveaxis(jax.lax.psum_scatter(jnp.moveaxis(shard, dimension, 0), axis, tiled=True), 0, dimension)


def further_splits(names: Sequence[str], layout: Layout) -> list[tuple[str, ...]]:
    """Return, for each axis of an array, the mesh axes by which `opt_state` splits it further than `params` does."""
    both = zip(layout.splits(names, layout.params), layout.splits(names, layout.opt_state), strict=True)
    return [fine[len(coarse) :] for coarse, fine in both]


def all_gather_params(reduced: Tree, layout: Layout) -> Tree:
    """Gather values from `opt_state` to `params`: one all-gather over `replica` per array."""
    return layout.constrain(reduced, layout.params)
