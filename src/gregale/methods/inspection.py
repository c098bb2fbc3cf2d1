"""Inspect a step beside its loss: the sizes of parameters, gradients and updates, layer by layer."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import Tree, is_layers, is_named

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
