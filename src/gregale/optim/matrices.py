"""Which parameters are matrices: they decay, and Muon orthogonalises them. Decided by axis names, never by paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
from haliax import NamedArray

from gregale.axes.layout import EMBED, LAYERS, is_named, is_parameter

VOCAB = "vocab"


class MatrixAxes(NamedTuple):
    """The two sides of a matrix: names of axes (positions, for an array without names). All others are batch axes."""

    inputs: tuple[str | int, ...]
    outputs: tuple[str | int, ...]


MatrixAxesOf = Callable[[NamedArray | jax.Array], MatrixAxes | None]


def matrix_axes(leaf: NamedArray | jax.Array) -> MatrixAxes | None:
    """The sides of a parameter, or None for what is not a matrix: norm scales, biases, embeddings, output heads.

    With names: `embed` is one side, all axes but `layers` are the other, and the side that comes first is the input:
    `[layers, embed, mlp]` maps embed to mlp, `[layers, heads, head_size, embed]` maps (heads, head_size) to embed. An
    array with a `vocab` axis, and one without an `embed` axis (an attention bias `[layers, heads, head_size]`), is no
    matrix. A model with other names passes a function of its own. Without names: an array with exactly two axes.
    """
    if not isinstance(leaf, NamedArray):
        return MatrixAxes((0,), (1,)) if leaf.ndim == 2 else None
    names = tuple(name for name in leaf.axis_names if name != LAYERS)
    others = tuple(name for name in names if name != EMBED)
    if EMBED not in names or not others or VOCAB in names:
        return None
    return MatrixAxes((EMBED,), others) if names[0] == EMBED else MatrixAxes(others, (EMBED,))


def decays(leaf: NamedArray | jax.Array, matrix_axes_of: MatrixAxesOf = matrix_axes) -> bool:
    """Whether weight decay is meant for this parameter: matrices, embeddings and heads; not scales and biases."""
    if matrix_axes_of(leaf) is not None:
        return True
    if not isinstance(leaf, NamedArray):
        return leaf.ndim > 1
    return {VOCAB, EMBED} <= set(leaf.axis_names)


def map_parameters(function, parameters):
    """A tree with `function(leaf)` in the place of every parameter, named or plain; None for what is not trained."""
    return jax.tree.map(function, eqx.filter(parameters, is_parameter), is_leaf=is_named)
