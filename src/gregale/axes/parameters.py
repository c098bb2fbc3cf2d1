"""The arrays of a model: parameters, which gradients train, buffers, which its own rule updates, and frozen weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.quantised_weight import QuantisedWeight


class Buffer(eqx.Module):
    """Marks an array of a model as state that gradients do not train: a running mean, a router's bias.

    The model's `update_buffers` computes it once a step. It keeps its own dtype, and lies under `compute` at all times.
    """

    value: NamedArray


class Frozen(eqx.Module):
    """Marks a weight that nothing trains, in the model of a method; models that compute have its value in its place.

    It lies under `params`. The value of an abstract model has a shape alone; `holding` gives it the weights.
    """

    value: NamedArray | jax.Array


def is_buffer(leaf) -> bool:
    return isinstance(leaf, Buffer)


def is_frozen(leaf) -> bool:
    return isinstance(leaf, Frozen)


def is_parameter(leaf) -> bool:
    """Return whether a leaf is trained: an array of floating-point numbers, or its abstract form; no mark."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def trainable(model: Any) -> Any:
    """Return a model, or an abstract one, with its parameters alone; None in place of other leaves."""
    return eqx.filter(model, is_parameter, is_leaf=lambda leaf: is_buffer(leaf) or is_frozen(leaf))


def static_of(model: Any) -> Any:
    """Return what `trainable` leaves out of a model, with frozen weights in place of their marks; None if abstract."""

    def value(leaf):
        held = is_frozen(leaf) and all(isinstance(each, jax.Array) for each in jax.tree.leaves(leaf))
        return leaf.value if held else None if is_frozen(leaf) else leaf

    return jax.tree.map(value, eqx.filter(model, is_parameter, inverse=True, is_leaf=is_frozen), is_leaf=is_frozen)


def buffers_of(model: Any) -> Any:
    """Return a model with its buffers alone, and None in place of other leaves; None if it has no buffer."""
    found = jax.tree.map(lambda leaf: leaf if is_buffer(leaf) else None, model, is_leaf=_is_whole)
    return found if jax.tree.leaves(found) else None


def frozen_of(model: Any) -> Any:
    """Return a model's frozen weights without their marks, and None in place of other leaves; None if it has none."""
    found = jax.tree.map(lambda leaf: leaf.value if is_frozen(leaf) else None, model, is_leaf=_is_whole)
    return found if jax.tree.leaves(found) else None


def holding(model: Any, frozen: Any) -> Any:
    """Return a model whose marks have the weights of `frozen_of`."""

    def held(leaf, value):
        return Frozen(value) if is_frozen(leaf) else leaf

    return model if frozen is None else jax.tree.map(held, model, frozen, is_leaf=_is_whole)


def with_arrays(model: Any, arrays: Any) -> Any:
    """Return a model, or its parameters alone, with the arrays of `buffers_of` or `frozen_of`."""
    if arrays is None:
        return model
    return jax.tree.map(lambda own, new: own if new is None else new, model, arrays, is_leaf=_is_whole)


def parameter_count(model) -> int:
    """Return the number of values in all parameters of a model; works on abstract ones."""
    return sum(leaf.size for leaf in jax.tree.leaves(trainable(model)))


def _is_whole(leaf) -> bool:
    return leaf is None or isinstance(leaf, Buffer | Frozen | NamedArray | QuantisedWeight)
