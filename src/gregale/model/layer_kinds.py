"""Layers of several kinds in one stack, such as those with a sliding window and those without.

A layer's kind determines its program: a kernel has one window. So a stack is cut into segments in which a pattern of
kinds repeats. A scan over a segment has a whole pattern in its body, each layer with its own program.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import LAYERS
from gregale.axes.parameters import Stacks, is_stacks, renamed, stack_axis
from gregale.errors import UserError

Kind = NamedArray | int
"""A layer's index in `LlamaConfig.kinds`; an array without axes in a pipeline, whose stages have different layers."""


Label = tuple[int, int]
"""The structure of a layer (`Stacks`) and its kind; equal layers are scanned together."""


class LayerSegment(NamedTuple):
    """Layers with the labels of `pattern`, repeated `repeats` times."""

    pattern: tuple[Label, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


def kind_constants(kinds: tuple[int, ...]) -> dict[str, NamedArray]:
    """Return the kind of every layer as an array along `layers`, named `kind`; nothing for one kind."""
    if len(set(kinds)) == 1:
        return {}
    return {"kind": NamedArray(jnp.asarray(kinds, jnp.int32), (LAYERS,))}


@cache
def layer_segments(labels: tuple[Label, ...], first: int = 0) -> tuple[LayerSegment, ...]:
    """Return the segments of a model's layers by their labels: few, with few layers in their patterns.

    - `first`: a number of layers after which a segment ends
    """
    if first:
        return layer_segments(labels[:first]) + layer_segments(labels[first:])
    best: list[tuple[LayerSegment, ...]] = [()]
    for end in range(1, len(labels) + 1):
        found = [
            (*best[start], LayerSegment(labels[start : start + period], (end - start) // period))
            for start in range(end)
            for period in range(1, end - start + 1)
            if (end - start) % period == 0 and labels[start : end - period] == labels[start + period : end]
        ]
        best.append(min(found, key=lambda cut: sum(1 + len(each.pattern) for each in cut)))
    return best[-1]


def labels_of(layers: Any, kinds: tuple[int, ...]) -> tuple[Label, ...]:
    """Return the label of each layer, of stacked arrays with these kinds."""
    order = layers.order if is_stacks(layers) else (0,) * len(kinds)
    return tuple(zip(order, kinds, strict=True))


def layers_apart(labels: tuple[Label, ...]) -> int:
    """Return the number of layers in the first pattern of labels, if others follow; else 0."""
    period = len(layer_segments(labels)[0].pattern) if labels else 0
    return period if period < len(labels) else 0


def cut(stacked: Any, parts: Sequence[LayerSegment]) -> list[list[Any]]:
    """Return, for each segment and each index of its pattern, a tree of arrays [repeats, ...] from [layers, ...].

    Gradients are joined in the same way, each array once. `Stacks` are cut one by one, and all have `layers` then.
    """
    if not is_stacks(stacked):
        return _cut_stack(stacked, parts)
    pieces = {}
    for structure in dict.fromkeys(stacked.order):
        own = [number for number, part in enumerate(parts) if _own(part, structure).pattern]
        stack = renamed(stacked.parts[structure], stack_axis(structure), LAYERS)
        found = _cut_stack(stack, [_own(parts[number], structure) for number in own])
        pieces |= {(number, structure): iter(each) for number, each in zip(own, found, strict=True)}
    return [[next(pieces[number, label[0]]) for label in part.pattern] for number, part in enumerate(parts)]


def _own(part: LayerSegment, structure: int) -> LayerSegment:
    """Return the layers of one structure in a segment."""
    return part._replace(pattern=tuple(label for label in part.pattern if label[0] == structure))


def _cut_stack(stacked: Any, parts: Sequence[LayerSegment]) -> list[list[Any]]:
    leaves, structure = jax.tree.flatten(stacked)
    by_leaf = [_cut(leaf, parts) for leaf in leaves]
    return [
        [structure.unflatten([pieces[number][place] for pieces in by_leaf]) for place in range(len(part.pattern))]
        for number, part in enumerate(parts)
    ]


def _cut(array: jax.Array, parts: Sequence[LayerSegment]) -> list[list[jax.Array]]:
    """Turn [layers, ...] into [repeats, ...] by segment and index."""

    def places(array: jax.Array, part: LayerSegment) -> list[jax.Array]:
        if len(part.pattern) == 1:
            return [array]
        grouped = array.reshape(part.repeats, len(part.pattern), *array.shape[1:])
        return [each.squeeze(1) for each in jax.lax.split(grouped, [1] * len(part.pattern), axis=1)]

    whole = [array] if len(parts) == 1 else jax.lax.split(array, [part.layers for part in parts])
    return [places(each, part) for each, part in zip(whole, parts, strict=True)]


def joined(pieces: Sequence[Sequence[Any]], labels: tuple[Label, ...], parts: Sequence[LayerSegment]) -> Any:
    """Invert `cut`: return stacked arrays, or `Stacks` of them if layers have several structures."""
    order = tuple(structure for structure, _ in labels)
    if not any(order):
        return _joined_stack(pieces)
    stacks = []
    for structure in range(max(order) + 1):
        own = [
            [piece for piece, label in zip(each, part.pattern, strict=True) if label[0] == structure]
            for each, part in zip(pieces, parts, strict=True)
        ]
        stacks.append(renamed(_joined_stack([each for each in own if each]), LAYERS, stack_axis(structure)))
    return Stacks(stacks, order)


def _joined_stack(pieces: Sequence[Sequence[Any]]) -> Any:

    def whole(*places: jax.Array) -> jax.Array:
        if len(places) == 1:
            return places[0]
        return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])

    of_segments = [jax.tree.map(whole, *places) for places in pieces]
    if len(of_segments) == 1:
        return of_segments[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *of_segments)


def in_periods(
    block: Callable, weights: Any, kinds: tuple[int, ...]
) -> tuple[Callable, list[dict[str, Any]], Callable[[Any], Any]]:
    """Return what a pipeline runs in place of single layers: `layer`, and the stacked arrays of each index of a period.

    The third result turns the stacked outs of `layer` into those of single layers, as a scan returns them.

    A period is the pattern of structures that repeats: all stages run the same program. For layers of one structure it
    is one layer. Raises `UserError` if the structures do not repeat.
    """
    labels = labels_of(weights, (0,) * len(kinds))
    parts = layer_segments(labels)
    pattern = parts[0].pattern
    if len(parts) > 1:
        shown = ", ".join(f"{part.repeats} x {[structure for structure, _ in part.pattern]}" for part in parts)
        raise UserError(
            f"pipeline: the stages run one program, and the structures of this model's layers do not repeat: {shown}. "
            "Use a model whose pattern of structures repeats, or no pipeline."
        )
    of_places = [kinds[place :: len(pattern)] for place in range(len(pattern))]

    def layer(x, period, rows, execution):
        outs = []
        for own, of_place in zip(period, of_places, strict=True):
            x, out = block(x, own["weights"], own.get("kind", of_place[0]), rows, execution)
            outs.append(out)
        return x, outs

    stacks = zip(cut(weights, parts)[0], of_places, strict=True)
    periods = [{"weights": own, **kind_constants(of_place)} for own, of_place in stacks]
    return layer, periods, lambda outs: joined([outs], labels, parts)
