"""Cut the local shard of an array into one shard for each replica, and join them again."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import Layout, Tree, is_named


@dataclass(frozen=True)
class ShardedLeaf:
    """An array of a tree on one device, without the axis that is reduced (`replica`, `island`)."""

    path: str  # its path in the tree
    axes: tuple[Axis, ...]  # its axes; a plain array's are named by their index
    named: bool  # whether it is a NamedArray
    params: PartitionSpec  # its partition under this mapping
    opt_state: PartitionSpec  # likewise
    shape: tuple[int, ...]  # of a device's shard under `params`
    split: int | None  # the dimension that `opt_state` splits over that axis, None if it splits none
    replicas: int  # the number of shards to cut it into

    @property
    def exact(self) -> bool:
        """Return whether it is a scalar: scalars are metrics, not parameters, and are sent exactly."""
        return not self.axes

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Return a device's shard under `opt_state`; of an unsplit array, its part of the padded flat shard."""
        if self.split is None:
            return (-(-prod(self.shape) // self.replicas),)
        shape = list(self.shape)
        shape[self.split] //= self.replicas
        return tuple(shape)

    @property
    def piece_size(self) -> int:
        return prod(self.piece_shape)

    def to_replica_shards(self, shard: jax.Array) -> jax.Array:
        """Turn [*shape] into [replicas, piece_size]; row r is replica r's result of a reduce-scatter."""
        if self.split is None:
            flat = shard.reshape(-1)
            return jnp.pad(flat, (0, self.replicas * self.piece_size - flat.size)).reshape(self.replicas, -1)
        d = self.split
        parts = shard.reshape(*self.shape[:d], self.replicas, -1, *self.shape[d + 1 :])
        return jnp.moveaxis(parts, d, 0).reshape(self.replicas, -1)

    def from_replica_shards(self, pieces: jax.Array) -> jax.Array:
        """Turn [replicas, piece_size] into [*shape]."""
        if self.split is None:
            return pieces.reshape(-1)[: prod(self.shape)].reshape(self.shape)
        parts = jnp.moveaxis(pieces.reshape(self.replicas, *self.piece_shape), 0, self.split)
        return parts.reshape(self.shape)

    def wrap(self, array: jax.Array):
        return NamedArray(array, tuple(axis.name for axis in self.axes)) if self.named else array


def leaves_of(tree: Tree, layout: Layout, axis: str, replicated: bool) -> list[ShardedLeaf]:
    """Return the arrays of a tree of named or plain arrays, in its order.

    - `axis`: the axis that is reduced, `replica` or `island`
    - `replicated`: whether the arrays have that axis (of a plain array, the first); it is left out
    """
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    leaves = []
    for path, array in paths:
        axes = array.axes if is_named(array) else tuple(Axis(f"dimension_{n}", s) for n, s in enumerate(array.shape))
        if replicated:
            axes = tuple(each for each in axes if each.name != axis) if is_named(array) else axes[1:]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves.append(_leaf(name, axes, is_named(array), layout, axis))
    return leaves


def _leaf(path: str, axes: tuple[Axis, ...], named: bool, layout: Layout, axis: str) -> ShardedLeaf:
    params, opt_state = layout.spec(axes, layout.params), layout.spec(axes, layout.opt_state)
    of_axes = layout.splits(axes, layout.params)
    shape = tuple(
        each.size // prod(layout.mesh.shape[name] for name in names) for each, names in zip(axes, of_axes, strict=True)
    )
    split = [place for place, names in enumerate(layout.splits(axes, layout.opt_state)) if axis in names]
    return ShardedLeaf(path, axes, named, params, opt_state, shape, split[0] if split else None, layout.axis(axis).size)
