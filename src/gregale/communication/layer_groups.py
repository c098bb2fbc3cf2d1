"""Parameters whose first layers are arrays of their own, so that the others cross a link behind the first layers.

The gradients of the later layers are complete before the backward pass of the first, and the later layers' weights are
needed after the forward pass of the first.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import LAYERS, Tree, is_named


class LayerGroups(eqx.Module):
    """An array with an axis `layers`, cut along it."""

    parts: tuple[NamedArray, NamedArray]  # of the first layers, and of the others


def cut_layers(tree: Tree, first: int) -> Tree:
    """Cut every named array with an axis `layers` into `LayerGroups`."""

    def one(leaf):
        if not is_named(leaf) or LAYERS not in leaf.axis_names:
            return leaf
        place = leaf.axis_names.index(LAYERS)
        before, after = jax.lax.split(leaf.array, [first, leaf.array.shape[place] - first], axis=place)
        return LayerGroups((NamedArray(before, leaf.axis_names), NamedArray(after, leaf.axis_names)))

    return jax.tree.map(one, tree, is_leaf=is_named)


def joined_layers(tree: Tree) -> Tree:
    """Invert `cut_layers`."""

    def one(leaf):
        if not isinstance(leaf, LayerGroups):
            return leaf
        names = leaf.parts[0].axis_names
        return NamedArray(jnp.concatenate([part.array for part in leaf.parts], names.index(LAYERS)), names)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, LayerGroups))
