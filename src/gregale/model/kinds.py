"""Layers of several kinds in one stack: a number says which kind a layer is.

Layers that are scanned are one program, in which the number is an array. What a kind decides on for a program, such as
a kernel's window, is then a branch of it; in a stack of one kind there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.model.config import LlamaConfig

Kind = NamedArray | int | None
"""A layer's place in `LlamaConfig.kinds`: an array without axes where layers are scanned; None: there is one kind."""


def stacked_kinds(config: LlamaConfig) -> NamedArray | None:
    """The kind of every layer, along `layers`; constants of the layers, which nothing differentiates."""
    if len(config.kinds) == 1:
        return None
    return hax.named(jnp.asarray(config.kind_numbers, jnp.int32), config.Layers)


def chosen(kind: Kind, each: Sequence[Any]) -> Any:
    """Of trees of arrays, one for each kind and all of one shape, the layer's own."""
    if isinstance(kind, NamedArray):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[kind.array], *each)
    return each[kind or 0]


def by_kind(config: LlamaConfig, kind: Kind, function: Callable[..., Any], *arguments) -> Any:
    """`function(the layer's kind, *arguments)`, which has to give the same shapes for all kinds."""
    if isinstance(kind, NamedArray):
        return jax.lax.switch(kind.array, [partial(function, each) for each in config.kinds], *arguments)
    return function(config.kinds[kind or 0], *arguments)
