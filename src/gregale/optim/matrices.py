"""Select the parameters that are matrices: they decay, and Muon orthogonalises them. Axis names decide, not paths."""

from typing import NamedTuple

import jax
from haliax import NamedArray

from gregale.axes.layout import EMBED, EXPERTS, LORA_RANK, is_layers, is_named
from gregale.axes.parameters import trainable

VOCAB = "vocab"


class MatrixAxes(NamedTuple):
    """The two sides of a matrix: names of axes (positions, for an array without names). All others are batch axes."""

    inputs: tuple[str | int, ...]
    outputs: tuple[str | int, ...]


def matrix_axes(leaf: NamedArray | jax.Array) -> MatrixAxes | None:
    """Return the sides of a parameter, or None if it is not a matrix: norm scales, biases, embeddings, output heads.

    With names: `embed` is one side, all axes but `layers` are the other, and the side that comes first is the input:
    `[layers, embed, mlp]` maps embed to mlp, `[layers, heads, head_size, embed]` maps (heads, head_size) to embed. Each
    expert is a matrix: `[layers, experts, embed, mlp]` has a batch axis `experts`. In adapters `lora_rank` is that
    side. An array with a `vocab` axis, and one without such a side (an attention bias `[layers, heads, head_size]`), is
    not a matrix. Without names: an array with exactly two axes.
    """
    if not isinstance(leaf, NamedArray):
        return MatrixAxes((0,), (1,)) if leaf.ndim == 2 else None
    names = [name for name in leaf.axis_names if not is_layers(name) and name != EXPERTS]
    side = LORA_RANK if LORA_RANK in names else EMBED
    others = tuple(name for name in names if name != side)
    if side not in names or not others or VOCAB in names:
        return None
    return MatrixAxes((side,), others) if names[0] == side else MatrixAxes(others, (side,))


def decays(leaf: NamedArray | jax.Array) -> bool:
    """Return whether weight decay applies to this parameter: matrices, embeddings and heads; not scales and biases."""
    if matrix_axes(leaf) is not None:
        return True
    if not isinstance(leaf, NamedArray):
        return leaf.ndim > 1
    return {VOCAB, EMBED} <= set(leaf.axis_names)


def map_parameters(function, parameters):
    """Return a tree with `function(leaf)` for every parameter, named or plain; None for untrained leaves."""
    return jax.tree.map(function, trainable(parameters), is_leaf=is_named)
