"""The errors of error feedback: the arrays that have one, and their shardings."""

from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import Layout, Tree, is_layers
from gregale.codecs.config import ReduceConfig
from gregale.codecs.feedback import QuantisedArray, stored_block
from gregale.communication.replica_shards import ShardedLeaf, leaves_of


class ErrorState(NamedTuple):
    """The unsent rest in 8 bits, by the path of its array; empty for a phase without feedback.

    A block of the stored numbers lies along the last axis, inside one device. The scales carry the same axis names,
    the last axis shorter, so that both are sharded as the arrays they belong to.
    """

    first: dict[str, QuantisedArray]  # of the first phase: [replica, *axes], under `params`
    second: dict[
        str, QuantisedArray
    ]  # of the second: [*axes] under `opt_state`; [replica, *axes] of arrays it does not split
    steps: Any  # int32 []: reductions so far


def init_error(tree: Tree, layout: Layout, config: ReduceConfig, axis: str) -> ErrorState:
    """Return a zero error for arrays that are averaged over `axis`, given without it (only shapes are read)."""
    leaves = [leaf for leaf in leaves_of(tree, layout, axis, replicated=False) if not leaf.exact]
    first, second = {}, {}
    for leaf in leaves if config.feedback else []:
        replicated = (layout.axis(axis), *leaf.axes)
        if config.codec != "none":
            first[leaf.path] = _zeros(replicated, layout, layout.params)
        if config.gather_codec != "none":
            axes = replicated if leaf.split is None else leaf.axes
            second[leaf.path] = _zeros(axes, layout, second_mapping(layout, axis))
    return ErrorState(first, second, jnp.zeros((), jnp.int32))


def _zeros(axes: tuple[Axis, ...], layout: Layout, mapping) -> QuantisedArray:
    if is_layers(axes[-1].name):  # a fragment has some of the layers, so blocks cannot span them
        axes = (*axes, Axis("value", 1))
    *others, last = axes
    block = stored_block(last.size // layout.devices((last,), mapping))
    scales = hax.zeros((*others, Axis(last.name, last.size // block)), jnp.bfloat16)
    return QuantisedArray(hax.zeros(axes, jnp.uint8), scales)


def error_shardings(error: ErrorState, layout: Layout, axis: str) -> ErrorState:
    return ErrorState(
        first=layout.shardings(error.first, layout.params),
        second=layout.shardings(error.second, second_mapping(layout, axis)),
        steps=jax.tree.map(lambda _: NamedSharding(layout.mesh, PartitionSpec()), error.steps),
    )


def second_mapping(layout: Layout, axis: str):
    """Return the mapping of the second phase's errors."""
    return {**layout.opt_state, axis: axis}


def next_step(error: ErrorState, config: ReduceConfig) -> ErrorState:
    """Return the errors at the start of a step, with the step counted; zero after every `reset_every` steps."""
    counted = error._replace(steps=error.steps + 1)
    if config.feedback is None or config.feedback.reset_every is None:
        return counted
    due = error.steps % config.feedback.reset_every == 0

    def reset(stored: QuantisedArray) -> QuantisedArray:
        return stored._replace(scales=jax.tree.map(lambda scales: jnp.where(due, 0, scales), stored.scales))

    first, second = ({path: reset(one) for path, one in errors.items()} for errors in (error.first, error.second))
    return counted._replace(first=first, second=second)


def arrays_of(errors: dict[str, QuantisedArray], leaves: list[ShardedLeaf]) -> dict[str, QuantisedArray]:
    found = {leaf.path: errors[leaf.path] for leaf in leaves if leaf.path in errors}
    return {path: QuantisedArray(codes.array, scales.array) for path, (codes, scales) in found.items()}


def updated(errors: dict[str, QuantisedArray], new: dict[str, QuantisedArray]) -> dict[str, QuantisedArray]:
    """Return the errors with new arrays for some of them, under the same axis names."""
    named = {path: jax.tree.unflatten(jax.tree.structure(errors[path]), stored) for path, stored in new.items()}
    return {**errors, **named}
