"""Parameters whose first layers are arrays of their own, so that the others cross a link behind the first layers.

The gradients of the later layers are complete before the backward pass of the first, and the later layers' weights are
needed after the forward pass of the first.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import Tree, is_named
from gregale.axes.parameters import layer_numbers, layer_order, layers_axis


class LayerGroups(eqx.Module):
    """A stack of layers, cut along their axis."""

    parts: tuple[NamedArray, NamedArray]  # of the first layers, and of the others


def cut_layers(tree: Tree, first: int) -> Tree:
    """Cut the first layers off every stack, into `LayerGroups`; a stack of only first or later layers stays whole."""
    numbers = layer_numbers(layer_order(tree))

    def one(leaf):
        axis = layers_axis(leaf)
        rows = sum(number < first for number in numbers.get(axis or "", ()))
        if axis is None or rows in (0, len(numbers[axis])):
            return leaf
        place = leaf.axis_names.index(axis)
        before, after = jax.lax.split(leaf.array, [rows, leaf.array.shape[place] - rows], axis=place)
        return LayerGroups((NamedArray(before, leaf.axis_names), NamedArray(after, leaf.axis_names)))

    return jax.tree.map(one, tree, is_leaf=is_named)


def joined_layers(tree: Tree) -> Tree:
    """Invert `cut_layers`."""

    def one(leaf):
        if not isinstance(leaf, LayerGroups):
            return leaf
        names = leaf.parts[0].axis_names
        place = names.index(layers_axis(leaf.parts[0]))
        return NamedArray(jnp.concatenate([part.array for part in leaf.parts], place), names)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, LayerGroups))
