"""Layers of several kinds in one stack, such as those with a sliding window and those without.

A layer's kind determines its program: a kernel has one window. So a stack is cut into stretches in which a pattern of
kinds repeats. A scan over a stretch has a whole pattern in its body, each layer with its own program.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import LAYERS
from gregale.model.config import LlamaConfig

Kind = NamedArray | int
"""A layer's index in `LlamaConfig.kinds`; an array without axes in a pipeline, whose stages have different layers."""


class Stretch(NamedTuple):
    """Layers with the kinds of `pattern`, repeated `repeats` times."""

    pattern: tuple[int, ...]
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
def stretches(kinds: tuple[int, ...], first: int = 0) -> tuple[Stretch, ...]:
    """Return the stretches of a stack by the kinds of its layers: few, with few layers in their patterns.

    - `first`: a number of layers after which a stretch ends
    """
    if first:
        return stretches(kinds[:first]) + stretches(kinds[first:])
    best: list[tuple[Stretch, ...]] = [()]
    for end in range(1, len(kinds) + 1):
        found = [
            (*best[start], Stretch(kinds[start : start + period], (end - start) // period))
            for start in range(end)
            for period in range(1, end - start + 1)
            if (end - start) % period == 0 and kinds[start : end - period] == kinds[start + period : end]
        ]
        best.append(min(found, key=lambda cut: sum(1 + len(each.pattern) for each in cut)))
    return best[-1]


def layers_apart(kinds: tuple[int, ...]) -> int:
    """Return the number of layers in the first pattern of kinds, if others follow; else 0."""
    period = len(stretches(kinds)[0].pattern) if kinds else 0
    return period if period < len(kinds) else 0


def cut(stacked: Any, parts: Sequence[Stretch]) -> list[list[Any]]:
    """Return, for each stretch and each index of its pattern, a tree of arrays [repeats, ...] from [layers, ...].

    Gradients are joined in the same way, each array once.
    """
    leaves, structure = jax.tree.flatten(stacked)
    by_leaf = [_cut(leaf, parts) for leaf in leaves]
    return [
        [structure.unflatten([pieces[number][place] for pieces in by_leaf]) for place in range(len(part.pattern))]
        for number, part in enumerate(parts)
    ]


def _cut(array: jax.Array, parts: Sequence[Stretch]) -> list[list[jax.Array]]:
    """Turn [layers, ...] into [repeats, ...] by stretch and index."""

    def places(array: jax.Array, part: Stretch) -> list[jax.Array]:
        if len(part.pattern) == 1:
            return [array]
        grouped = array.reshape(part.repeats, len(part.pattern), *array.shape[1:])
        return [each.squeeze(1) for each in jax.lax.split(grouped, [1] * len(part.pattern), axis=1)]

    whole = [array] if len(parts) == 1 else jax.lax.split(array, [part.layers for part in parts])
    return [places(each, part) for each, part in zip(whole, parts, strict=True)]


def joined(pieces: Sequence[Sequence[Any]]) -> Any:
    """Invert `cut`."""

    def whole(*places: jax.Array) -> jax.Array:
        if len(places) == 1:
            return places[0]
        return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])

    of_stretches = [jax.tree.map(whole, *places) for places in pieces]
    if len(of_stretches) == 1:
        return of_stretches[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *of_stretches)


def by_kind(config: LlamaConfig, kind: Kind, function: Callable[..., Any], *arguments) -> Any:
    """Return `function(the layer's kind, *arguments)`, which must have the same shapes for all kinds.

    If the kind is an array, under the `vmap` over a pipeline's stages, all kinds are computed and one is selected.
    """
    if isinstance(kind, NamedArray):
        return jax.lax.switch(kind.array, [partial(function, each) for each in config.kinds], *arguments)
    return function(config.kinds[kind], *arguments)
