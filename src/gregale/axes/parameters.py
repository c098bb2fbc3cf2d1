"""The arrays of a model: parameters, which gradients train, and buffers, which its own rule updates."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray


class Buffer(eqx.Module):
    """Marks an array of a model as state that gradients do not train: a running mean, a router's bias.

    The model's `update_buffers` computes it once a step. It keeps its own dtype, and lies under `compute` at all times.
    """

    value: NamedArray


def is_buffer(leaf) -> bool:
    return isinstance(leaf, Buffer)


def is_parameter(leaf) -> bool:
    """Return whether a leaf is trained: an array of floating-point numbers, or its abstract form; no `Buffer`."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def trainable(model: Any) -> Any:
    """Return a model, or an abstract one, with its parameters alone; None in place of other leaves."""
    return eqx.filter(model, is_parameter, is_leaf=is_buffer)


def buffers_of(model: Any) -> Any:
    """Return a model with its buffers alone, and None in place of other leaves; None if it has no buffer."""
    found = jax.tree.map(lambda leaf: leaf if is_buffer(leaf) else None, model, is_leaf=_is_whole)
    return found if jax.tree.leaves(found) else None


def with_buffers(model: Any, buffers: Any) -> Any:
    """Return a model, or its parameters alone, with the buffers of `buffers_of`."""
    if buffers is None:
        return model
    return jax.tree.map(lambda own, new: own if new is None else new, model, buffers, is_leaf=_is_whole)


def parameter_count(model) -> int:
    """Return the number of values in all parameters of a model; works on abstract ones."""
    return sum(leaf.size for leaf in jax.tree.leaves(trainable(model)))


def _is_whole(leaf) -> bool:
    return leaf is None or isinstance(leaf, Buffer | NamedArray)
