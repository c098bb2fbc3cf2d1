"""Fragments of a tree of parameters, split along the named `layers` axis."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import Tree, is_named
from gregale.axes.parameters import layers_axis
from gregale.communication.quantised import ErrorState
from gregale.methods.schedule import Schedule

FRAGMENT = "fragment"


class Fragment(eqx.Module):
    """A part of a tree: an argument of compiled programs, so that fragments of equal size share a program.

    - `index`: int32 scalar, the fragment's number
    - `sent`: int32 scalar, the number of steps after which it was sent
    - `rows`: by the axis of each stack of layers, int32 [layers of the fragment in it]; None for the fragment of all
      arrays without such an axis
    - `whole`: whether it is the whole tree (P = 1)
    """

    index: Any
    sent: Any
    rows: Any
    whole: bool = eqx.field(static=True)

    @staticmethod
    def at(schedule: Schedule, index: int | None, sent: int) -> "Fragment | None":
        if index is None:
            return None
        return Fragment(np.int32(index), np.int32(sent), schedule.rows_of(index), whole=schedule.fragments == 1)

    def take(self, tree: Tree) -> Tree:
        """Return the fragment's part of a tree, None elsewhere.

        It has the fragment's layers of stacked arrays, and the fragment's own entry of arrays with an
        axis `fragment`. Other arrays are whole if they belong to the fragment.
        """
        return jax.tree.map(self._take, tree, is_leaf=is_named)

    def put(self, tree: Tree, part: Tree) -> Tree:
        """Return the tree with the fragment's part replaced; nothing else changes by a bit."""
        return jax.tree.map(self._put, tree, part, is_leaf=is_named)

    def _take(self, leaf):
        if _has(leaf, FRAGMENT):
            return leaf.rearrange((FRAGMENT, ...)).array[self.index]
        axis = layers_axis(leaf)
        if self.whole or (self.rows is None and axis is None):
            return leaf
        if self.rows is None or axis not in self.rows:
            return None
        return NamedArray(jnp.take(leaf.array, self.rows[axis], axis=leaf.axis_names.index(axis)), leaf.axis_names)

    def _put(self, leaf, new):
        if new is None:
            return leaf
        if _has(leaf, FRAGMENT):
            leaf = leaf.rearrange((FRAGMENT, ...))
            return NamedArray(leaf.array.at[self.index].set(new), leaf.axis_names)
        if self.rows is None:
            return new
        axis = layers_axis(leaf)
        place = (slice(None),) * leaf.axis_names.index(axis) + (self.rows[axis],)
        return NamedArray(leaf.array.at[place].set(new.array), leaf.axis_names)


class Alike(NamedTuple):
    """The kinds of a schedule's fragments: fragments of equal size share a compiled branch."""

    kind: np.ndarray  # int32 [fragment]
    rows: list[dict[str, np.ndarray] | None]  # by kind and axis: int32 [fragment, rows], other fragments' unused


def fragments_alike(schedule: Schedule) -> Alike:
    """Group a schedule's fragments by their numbers of rows; the one without layers is kind 0."""
    kind, rows = np.zeros(schedule.fragments, np.int32), []
    every = {number: schedule.rows_of(number) for number in range(schedule.fragments)}
    of_each = {number: own for number, own in every.items() if own is not None}
    without: list[dict[str, np.ndarray] | None] = [None] if len(of_each) < len(every) else []
    for sizes in sorted({sizes_of(own) for own in of_each.values()}):
        rows.append({axis: np.zeros((schedule.fragments, count), np.int32) for axis, count in sizes})
        for number in (number for number, own in of_each.items() if sizes_of(own) == sizes):
            kind[number] = len(without) + len(rows) - 1
            for axis, own in of_each[number].items():
                rows[-1][axis][number] = own
    return Alike(kind, [*without, *rows])


def sizes_of(rows: Mapping[str, np.ndarray]) -> tuple[tuple[str, int], ...]:
    """Return the number of a fragment's rows in each stack."""
    return tuple((axis, len(own)) for axis, own in rows.items())


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
