"""Layers of several structures: one stack of arrays for each structure.

A structure is a set of arrays with their shapes: an MLP of another width, or attention of another kind, is another
structure. The first stack has the axis `layers`, further ones have `layers_1`, `layers_2` and so on. All of them lie
where `layers` lies.
"""

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import LAYERS, is_layers, is_named
from gregale.errors import UserError


class Stacks(eqx.Module):
    """Holds the layers of a model with several structures, a stack for each.

    - `parts`: of structure s, a tree of arrays with the axis `stack_axis(s)`
    - `order`: the structure of each layer, in the order of the computation
    """

    parts: list[Any]
    order: tuple[int, ...] = eqx.field(static=True)

    def __check_init__(self):
        if set(self.order) != {*range(len(self.parts))}:
            raise UserError(
                f"Stacks: order is {self.order}, and there are {len(self.parts)} stacks: it needs each of 0 to "
                f"{len(self.parts) - 1}, and no other."
            )


def stack_axis(structure: int) -> str:
    """Return the name of the axis of a structure's layers."""
    return f"{LAYERS}_{structure}" if structure else LAYERS


def layers_axis(leaf: Any) -> str | None:
    """Return the name of an array's axis of layers; None if it has none, or is not named."""
    return next(filter(is_layers, leaf.axis_names), None) if is_named(leaf) else None


def is_stacks(node: Any) -> bool:
    return isinstance(node, Stacks)


def layer_order(model: Any) -> tuple[int, ...]:
    """Return the structure of each layer of a model, or of its parameters; empty without stacked layers."""
    if found := next(filter(is_stacks, jax.tree.leaves(model, is_leaf=is_stacks)), None):
        return found.order
    leaves = jax.tree.leaves(model, is_leaf=is_named)
    return next(((0,) * leaf.resolve_axis(LAYERS).size for leaf in leaves if layers_axis(leaf)), ())


def layer_numbers(order: Sequence[int]) -> dict[str, list[int]]:
    """Return, for the axis of each stack, the numbers of its layers in the whole model."""
    return {stack_axis(each): np.flatnonzero(np.asarray(order) == each).tolist() for each in dict.fromkeys(order)}


def names_of_arrays(tree: Any) -> list[tuple[Any, list[str]]]:
    """Return each array of a model with its name, `norm.weight`, or one for each layer, `layer.3.mlp.up.weight`."""
    numbers = layer_numbers(layer_order(tree))

    def names(path: tuple, leaf: Any) -> list[str]:
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if (axis := layers_axis(leaf)) is None:
            return [".".join(words)]
        inside = words[3 if words[1:2] == ["parts"] else 1 :]
        return [".".join(["layer", str(layer), *inside]) for layer in numbers[axis]]

    return [(leaf, names(path, leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]]


def has_name(match: str, name: str) -> bool:
    """Return whether a pattern has a name: `*` stands for any characters, `|` separates alternatives."""
    return _pattern(match).fullmatch(name) is not None


@cache
def _pattern(match: str) -> re.Pattern:
    return re.compile("|".join(f"(?:{translate(each.strip())})" for each in match.split("|")))


def renamed(tree: Any, old: str, new: str) -> Any:
    """Return a tree whose named arrays have another name for an axis."""
    if old == new:
        return tree

    def one(leaf):
        names = [new if name == old else name for name in leaf.axis_names] if is_named(leaf) else ()
        return NamedArray(leaf.array, tuple(names)) if is_named(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=is_named)


def in_layer_order(tree: Any) -> Any:
    """Return arrays of all layers with the axis `layers`; those of `Stacks` need equal shapes."""
    if not is_stacks(tree):
        return tree
    numbers = [each for own in layer_numbers(tree.order).values() for each in own]
    structures = dict.fromkeys(tree.order)
    parts = [renamed(tree.parts[each], stack_axis(each), LAYERS) for each in structures]
    order = np.argsort(numbers)

    def one(*own: NamedArray) -> NamedArray:
        place = own[0].axis_names.index(LAYERS)
        return NamedArray(jnp.concatenate([each.array for each in own], place).take(order, place), own[0].axis_names)

    return jax.tree.map(one, *parts, is_leaf=is_named)
