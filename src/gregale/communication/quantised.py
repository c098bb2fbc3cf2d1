"""Averages over `replica` in which only codecs' messages cross it: uint8, in few bits, with error feedback.

The first leg (`reduce_quantised`) is an all-to-all of pieces, which every replica decodes and averages in float32: a
reduce-scatter. The second (`give_back_quantised`) is an all-gather of what was computed from the averages. Integers are
never summed, and everybody decodes the same bytes, so replicas stay equal to the last bit. Each leg sends the arrays of
a tree as one message, for one latency instead of one an array; a message is small, an eighth of the tree at 4 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import REPLICA, Layout, is_named
from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.communication.feedback import ErrorState, arrays_of, next_step, updated
from gregale.communication.legs import EXACT, Leg, first_leg, second_leg, totals
from gregale.communication.pieces import Leaf, leaves_of

Tree = Any


class WireBytes(NamedTuple):
    """Payload of one device in a step over `replica`: an all-to-all's operand, an all-gather's result."""

    totals: int  # all-gather: the weights and the scalars of the tree, as float32
    first: int  # all-to-all: the first leg
    second: int  # all-gather: the second leg of arrays that `opt_state` does not split, in `reduce_quantised`
    given_back: int  # all-gather: the second leg of the others, in `give_back_quantised`
    finite: int  # all-gathers: with feedback, one byte from each replica for each of the three that quantises


def wire_bytes(buffers: Tree, layout: Layout, config: ReduceConfig) -> WireBytes:
    """What `reduce_quantised` and `give_back_quantised` move, in closed form from the shapes of the buffers."""
    leaves = leaves_of(buffers, layout, replicated=True)
    arrays = [leaf for leaf in leaves if not leaf.exact]

    def payload(codec: Codec, some: list[Leaf]) -> int:
        return layout.replicas * sum(codec.message_bytes(leaf.piece_size) for leaf in some)

    first = payload(config.first_codec(), arrays)
    second = payload(config.second_codec(), [leaf for leaf in arrays if leaf.split is None])
    given_back = payload(config.second_codec(), [leaf for leaf in arrays if leaf.split is not None])
    exact = layout.replicas * EXACT.message_bytes(1 + len(leaves) - len(arrays))
    first_flags = config.codec != "none" and first > 0
    second_flags = ((second > 0) + (given_back > 0)) if config.second_leg != "none" else 0
    flags = layout.replicas * (first_flags + second_flags) if config.feedback else 0
    return WireBytes(exact, first, second, given_back, flags)


def reduce_quantised(
    sums: Tree, weights: NamedArray, error: ErrorState, layout: Layout, config: ReduceConfig
) -> tuple[Tree, ErrorState]:
    """`(sum over replica of sums) / (sum over replica of weights)` under `opt_state`, float32, up to quantisation.

        g = sums / (total weight / R)       h = g + e       message = encode(h)
        average = mean over replicas of decode(message)     e = beta e + (1 - beta) (h - decode(message))

    Dividing by the mean weight first makes the plain mean of the decoded messages the weighted average, and keeps the
    error in the units of the average from one step to the next, however many tokens a step has.

    An array that `opt_state` splits ends as a reduce-scatter would leave it. Others are cut flat into R padded pieces,
    averaged alike, and brought together by the second leg's codec. Scalars (the loss) and the weights go exactly, as
    the bytes of float32. If a value on any device is not finite, neither is its average, and the error stays as it was.

    Arguments:
    - `sums`: named arrays with an axis `replica`, or plain arrays whose first axis is the replica; under `params`
    - `weights`: [replica]; what the sums are divided by, added up first
    - `error`: of `init_error`, or of the step before
    """
    leaves = leaves_of(sums, layout, replicated=True)
    error = next_step(error, config)
    first = arrays_of(error.first, leaves)
    second = arrays_of(error.second, [leaf for leaf in leaves if leaf.split is None])

    def on_device(shards, weight, first, second):
        values = {leaf.path: shard[0] for leaf, shard in zip(leaves, shards, strict=True)}
        averages, first, second = _reduce_on_device(leaves, (values, weight[0]), (first, second), layout, config)
        return [averages[leaf.path] for leaf in leaves], first, second

    buffers = {leaf.path: PartitionSpec(REPLICA, *leaf.params) for leaf in leaves}
    errors = ({path: buffers[path] for path in first}, {path: buffers[path] for path in second})
    run = jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(list(buffers.values()), PartitionSpec(REPLICA), *errors),
        out_specs=([leaf.opt_state for leaf in leaves], *errors),
        check_vma=False,
    )
    averages, first, second = run([_array(x) for x in _leaves(sums)], _array(weights), first, second)
    error = error._replace(first=updated(error.first, first), second=updated(error.second, second))
    return _like(sums, leaves, averages), error


def _reduce_on_device(leaves: list[Leaf], sums: tuple, errors: tuple, layout: Layout, config: ReduceConfig):
    """(local sums by path, weight) and (first, second) errors -> averages by path and the two errors."""
    (values, weight), (first, second) = sums, errors
    arrays = [leaf for leaf in leaves if not leaf.exact]
    exact = [leaf.path for leaf in leaves if leaf.exact]
    total, *exact_sums = totals([weight, *(values[path] for path in exact)])
    averages = {path: summed / total for path, summed in zip(exact, exact_sums, strict=True)}
    if arrays:
        scaled = {leaf.path: values[leaf.path].astype(jnp.float32) * (layout.replicas / total) for leaf in arrays}
        pieces, first = first_leg(arrays, scaled, first, _leg(config.first_codec(), layout, config))
        averages |= {leaf.path: pieces[leaf.path].reshape(leaf.piece_shape) for leaf in arrays}
    whole = [leaf for leaf in arrays if leaf.split is None]
    if whole:
        joined, second = second_leg(whole, averages, second, _leg(config.second_codec(), layout, config))
        averages |= joined
    return averages, first, second


def give_back_quantised(
    reduced: Tree, error: ErrorState, layout: Layout, config: ReduceConfig
) -> tuple[Tree, ErrorState]:
    """What was computed under `opt_state`, under `params` again, through the second leg's codec.

        h = x + e        given back = decode(encode(h))        e = beta e + (1 - beta) (h - given back)

    All replicas get the same bits, the one that a value comes from too. Arrays that `opt_state` does not split are
    whole already and stay as they are.

    Arguments:
    - `reduced`: the tree that `reduce_quantised` returned, or one of the same structure and shapes
    - `error`: as `reduce_quantised` returned it in this step
    """
    leaves = leaves_of(reduced, layout, replicated=False)
    arrays = {leaf.path: _array(x) for leaf, x in zip(leaves, _leaves(reduced), strict=True)}
    split = [leaf for leaf in leaves if leaf.split is not None]
    if not split:
        return reduced, error
    second = arrays_of(error.second, split)

    def on_device(shards, second):
        pieces = {path: shard.astype(jnp.float32).reshape(-1) for path, shard in shards.items()}
        return second_leg(split, pieces, second, _leg(config.second_codec(), layout, config))

    sharded = {leaf.path: leaf.opt_state for leaf in split}
    specs = {path: sharded[path] for path in second}
    run = jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(sharded, specs),
        out_specs=({leaf.path: leaf.params for leaf in split}, specs),
        check_vma=False,
    )
    given, second = run({leaf.path: arrays[leaf.path] for leaf in split}, second)
    arrays |= given
    error = error._replace(second=updated(error.second, second))
    return _like(reduced, leaves, [arrays[leaf.path] for leaf in leaves]), error


def _leg(codec: Codec, layout: Layout, config: ReduceConfig) -> Leg:
    fast_axes = tuple(axis for axis, size in layout.mesh.shape.items() if axis != REPLICA and size > 1)
    return Leg(codec, config.feedback.beta if config.feedback else 0.0, fast_axes)


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=is_named)


def _array(leaf) -> jax.Array:
    """A leaf's array, with `replica` first where it has that axis."""
    if not isinstance(leaf, NamedArray):
        return leaf
    return leaf.rearrange((REPLICA, ...)).array if REPLICA in leaf.axis_names else leaf.array


def _like(tree: Tree, leaves: list[Leaf], arrays: list[jax.Array]) -> Tree:
    """The arrays in the structure of the tree, with the axes of the leaves."""
    wrapped = [leaf.wrap(array) for leaf, array in zip(leaves, arrays, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_named), wrapped)
