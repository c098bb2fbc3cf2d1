"""Fragments of a tree of parameters, split along the named `layers` axis."""

from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import LAYERS, Tree, is_named
from gregale.communication.feedback import ErrorState
from gregale.methods.schedule import Schedule

FRAGMENT = "fragment"


class Fragment(eqx.Module):
    """A part of a tree: an argument of compiled programs, so that fragments of equal size share a program.

    - `index`: int32 scalar, the fragment's number
    - `sent`: int32 scalar, the number of steps after which it was sent
    - `layers`: int32 [layers of the fragment]; None for the fragment of all arrays without a `layers` axis
    - `whole`: whether it is the whole tree (P = 1)
    """

    index: Any
    sent: Any
    layers: Any
    whole: bool = eqx.field(static=True)

    @staticmethod
    def at(schedule: Schedule, index: int | None, sent: int) -> "Fragment | None":
        if index is None:
            return None
        layers = schedule.layers_of(index) if index else None
        return Fragment(np.int32(index), np.int32(sent), layers, whole=schedule.fragments == 1)

    def take(self, tree: Tree) -> Tree:
        """Return the fragment's part of a tree, None elsewhere.

        It has the fragment's layers of arrays stacked over `layers`, and the fragment's own entry of arrays with an
        axis `fragment`. Other arrays are whole if they belong to the fragment.
        """
        return jax.tree.map(self._take, tree, is_leaf=is_named)

    def put(self, tree: Tree, part: Tree) -> Tree:
        """Return the tree with the fragment's part replaced; nothing else changes by a bit."""
        return jax.tree.map(self._put, tree, part, is_leaf=is_named)

    def _take(self, leaf):
        if _has(leaf, FRAGMENT):
            return leaf.rearrange((FRAGMENT, ...)).array[self.index]
        if self.whole or (self.layers is None and not _has(leaf, LAYERS)):
            return leaf
        if self.layers is None or not _has(leaf, LAYERS):
            return None
        return NamedArray(jnp.take(leaf.array, self.layers, axis=leaf.axis_names.index(LAYERS)), leaf.axis_names)

    def _put(self, leaf, new):
        if new is None:
            return leaf
        if _has(leaf, FRAGMENT):
            leaf = leaf.rearrange((FRAGMENT, ...))
            return NamedArray(leaf.array.at[self.index].set(new), leaf.axis_names)
        if self.layers is None:
            return new
        place = (slice(None),) * leaf.axis_names.index(LAYERS) + (self.layers,)
        return NamedArray(leaf.array.at[place].set(new.array), leaf.axis_names)


class Alike(NamedTuple):
    """The kinds of a schedule's fragments: fragments of equal size share a compiled branch."""

    kind: np.ndarray  # int32 [fragment]
    layers: list[np.ndarray | None]  # by kind: int32 [fragment, layers of the kind], other fragments' rows unused


def fragments_alike(schedule: Schedule) -> Alike:
    """Group a schedule's fragments by their numbers of layers; the one without layers is kind 0."""
    numbers = range(1, schedule.fragments)
    sizes = sorted({len(schedule.layers_of(number)) for number in numbers})
    kind, layers = (
        np.zeros(schedule.fragments, np.int32),
        [None, *(np.zeros((schedule.fragments, n), np.int32) for n in sizes)],
    )
    for number in numbers:
        own = schedule.layers_of(number)
        kind[number] = 1 + sizes.index(len(own))
        layers[kind[number]][number] = own
    return Alike(kind, layers)


def _has(leaf, name: str) -> bool:
    return isinstance(leaf, NamedArray) and name in leaf.axis_names


def per_fragment(optimizer: optax.GradientTransformation, state: Tree, fragments: int) -> Tree:
    """Return an optimizer's state whose leaves unlike the parameters (its counters) have an axis of fragments."""

    def counter(leaf):
        names = (FRAGMENT, *(f"{FRAGMENT}_{dimension}" for dimension in range(leaf.ndim)))
        return NamedArray(jnp.broadcast_to(leaf, (fragments, *leaf.shape)), names)

    return optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: leaf, state, transform_non_params=counter, is_leaf=is_named
    )


def errors_per_fragment(error: ErrorState | None, fragments: int) -> ErrorState | None:
    """Return the errors of quantised averages with one counter for each fragment; None stays None."""
    if error is None:
        return None
    return error._replace(steps=hax.zeros(hax.Axis(FRAGMENT, fragments), jnp.int32))


def layers_in(tree: Tree) -> int:
    """Return the number of layers over which a tree's arrays are stacked; 0 if none is."""
    sizes = [leaf.resolve_axis(LAYERS).size for leaf in jax.tree.leaves(tree, is_leaf=is_named) if _has(leaf, LAYERS)]
    return sizes[0] if sizes else 0
