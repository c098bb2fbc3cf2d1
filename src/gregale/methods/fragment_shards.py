"""The abstract outer state of an island: arrays by fragment and shard, with their names.

{fragment}/theta/{path}|{index of the shard along each axis}
{fragment}/optimizer/{path in the state}
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.axes.layout import Tree
from gregale.communication.quantised import RowLayout
from gregale.communication.reduce import ShardedLeaf, keys_here
from gregale.methods.island import Island
from gregale.methods.schedule import Fragment


class FragmentShards(NamedTuple):
    """A fragment's arrays on this host."""

    index: int  # of the fragment
    fragment: Fragment
    tree: Tree  # the fragment's part of the parameters
    leaves: list[ShardedLeaf]  # of the fragment, on one device
    places: list[NamedSharding]  # the sharding of each leaf
    theta: dict[str, jax.ShapeDtypeStruct]  # by key of the shard
    optimizer: Tree  # the outer optimizer's state for such a dictionary
    rows: dict[str, RowLayout]  # by key: the rows of messages

    def expected(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return type and shape of every array by name."""
        arrays = named(self.index, self.theta, self.optimizer)
        return {name: (np.dtype(array.dtype), array.shape) for name, array in arrays.items()}

    @property
    def size(self) -> int:
        """Return the bytes of all arrays."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.expected().values())


def part_of(island: Island, index: int) -> FragmentShards:
    """Return the fragment with this number."""
    fragment, mesh = island.fragment(index), island.layout.mesh
    tree = jax.eval_shape(fragment.take, island.parameters)
    leaves = island.leaves(fragment)
    places = [NamedSharding(mesh, leaf.params) for leaf in leaves]
    theta, rows = {}, {}
    for leaf, place, array in zip(leaves, places, jax.tree.leaves(tree), strict=True):
        for key in keys_here(leaf.path, shape_of(leaf), place):
            theta[key], rows[key] = jax.ShapeDtypeStruct(leaf.shape, array.dtype), island.rows(leaf)
    optimizer = jax.eval_shape(island.outer.init, theta)
    return FragmentShards(index, fragment, tree, leaves, places, theta, optimizer, rows)


def shape_of(leaf: ShardedLeaf) -> tuple[int, ...]:
    """Return the shape of the whole array."""
    return tuple(axis.size for axis in leaf.axes)


def theta_name(index: int, key: str) -> str:
    return f"{index}/theta/{key}"


def optimizer_names(index: int, optimizer: Tree) -> list[str]:
    """Return the names of the optimizer's arrays, in the order of its leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    return [f"{index}/optimizer/{jax.tree_util.keystr(path, simple=True, separator='.')}" for path, _ in leaves]


def named(index: int, theta: Mapping[str, Any], optimizer: Tree) -> dict[str, Any]:
    """Return the arrays of both, by name."""
    arrays = zip(optimizer_names(index, optimizer), jax.tree.leaves(optimizer), strict=True)
    return {theta_name(index, key): array for key, array in theta.items()} | dict(arrays)
