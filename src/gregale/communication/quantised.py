"""Averages over `replica` by codecs' messages: uint8, in few bits, with error feedback.

The first phase (`reduce`) is an all-to-all of shards, which every replica decodes and averages in float32: a
reduce-scatter. The second (`all_gather_params`) is an all-gather of values computed from the averages. Integers are
never summed, and all replicas decode the same bytes, so replicas stay equal to the last bit. Each phase sends the
arrays of a tree as one message, for one latency instead of one per array. A message is small, an eighth of the tree at
4 bits.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.audit.traffic import FLOAT32, Transfer
from gregale.axes.layout import REPLICA, Layout, Tree, is_named
from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.codecs.feedback import load
from gregale.communication.collective_phases import (
    EXACT,
    CollectivePhase,
    all_gather_phase,
    reduce_scatter_phase,
    totals,
)
from gregale.communication.feedback import ErrorState, arrays_of, error_shardings, init_error, next_step, updated
from gregale.communication.reduce import ExactReducer
from gregale.communication.replica_shards import ShardedLeaf, leaves_of


class QuantisationLoss(NamedTuple):
    relative_error: jax.Array  # float32 []: |h - decode(encode(h))| / |h|, over all replicas, with h = g + e
    error_norm: jax.Array  # float32 []: |e|, over all replicas; 0 without feedback


@dataclass(frozen=True)
class QuantisedReducer:
    """Averages a tree over `axis` through the codecs of `config`; see `communication.reduce.ExactReducer`.

    `opt_state` of the layout splits an array no further than `params` does, but over `axis`.
    """

    layout: Layout
    config: ReduceConfig
    axis: str = REPLICA  # or `island`

    def init(self, tree: Tree) -> ErrorState:
        """Return a zero error, for a tree of arrays without the axis."""
        return init_error(tree, self.layout, self.config, self.axis)

    def shardings(self, error: ErrorState) -> ErrorState:
        return error_shardings(error, self.layout, self.axis)

    def totals(self, *arrays: NamedArray) -> list[jax.Array]:
        """Return exact sums over the axis of [replica, ...] arrays: the bytes of float32 values cross it."""

        def on_device(arrays):
            return totals([shard[0] for shard in arrays], self.axis)

        lanes, everywhere = [PartitionSpec(self.axis)] * len(arrays), [PartitionSpec()] * len(arrays)
        run = self.layout.shard_map(on_device, (lanes,), everywhere)
        return run([array.array for array in arrays])

    def reduce(self, sums: Tree, weight: jax.Array, error: ErrorState) -> tuple[Tree, ErrorState]:
        """Return `(sum over replica of sums) / weight` under `opt_state`, up to quantisation.

            g = sums / (weight / R)       h = g + e       message = encode(h)
            average = mean over replicas of decode(message)     e = beta e + (1 - beta) (h - decode(message))

        Dividing by the mean weight first makes the plain mean of the decoded messages the weighted average, and keeps
        the error in the units of the average from one step to the next, however many tokens a step has.

        An array that `opt_state` splits has the result of a reduce-scatter. Others are cut flat into R padded shards,
        averaged in the same way, and gathered by the second phase's codec. Scalars are exact, as the bytes of float32.
        If a value on any device is not finite, neither is its average, and the error stays as it was.

        - `sums`: named arrays with an axis `replica`, or plain arrays whose first axis is the replica; under `params`
        - `weight`: float32 scalar, the total of all replicas
        - `error`: from `init`, or from the step before
        """
        leaves = leaves_of(sums, self.layout, self.axis, replicated=True)
        error = next_step(error, self.config)
        first = arrays_of(error.first, leaves)
        second = arrays_of(error.second, [leaf for leaf in leaves if leaf.split is None])

        def on_device(shards, weight, first, second):
            values = {leaf.path: shard[0] for leaf, shard in zip(leaves, shards, strict=True)}
            averages, first, second = self._reduce_on_device(leaves, values, weight, (first, second))
            return [averages[leaf.path] for leaf in leaves], first, second

        buffers = {leaf.path: PartitionSpec(self.axis, *leaf.params) for leaf in leaves}
        errors = ({path: buffers[path] for path in first}, {path: buffers[path] for path in second})
        out_specs = [leaf.opt_state for leaf in leaves], *errors
        run = self.layout.shard_map(on_device, (list(buffers.values()), PartitionSpec(), *errors), out_specs)
        arrays = [self._array(x) for x in _leaves(sums)]
        averages, first, second = run(arrays, weight, first, second)
        error = error._replace(first=updated(error.first, first), second=updated(error.second, second))
        return _like(sums, leaves, averages), error

    def all_gather_params(self, reduced: Tree, error: ErrorState) -> tuple[Tree, ErrorState]:
        """Gather values from `opt_state` to `params`, through the second phase's codec.

            h = x + e        given back = decode(encode(h))        e = beta e + (1 - beta) (h - given back)

        All replicas get the same bits, the sender too. Arrays that `opt_state` does not split are whole already and do
        not change.

        - `reduced`: the tree that `reduce` returned, or one of the same structure and shapes
        - `error`: as `reduce` returned it in this step
        """
        leaves = leaves_of(reduced, self.layout, self.axis, replicated=False)
        arrays = {leaf.path: self._array(x) for leaf, x in zip(leaves, _leaves(reduced), strict=True)}
        split = [leaf for leaf in leaves if leaf.split is not None]
        if not split:
            return reduced, error
        second = arrays_of(error.second, split)

        def on_device(shards, second):
            pieces = {path: shard.astype(jnp.float32).reshape(-1) for path, shard in shards.items()}
            return all_gather_phase(split, pieces, second, self._phase(self.config.second_codec()))

        sharded = {leaf.path: leaf.opt_state for leaf in split}
        specs = {path: sharded[path] for path in second}
        run = self.layout.shard_map(on_device, (sharded, specs), ({leaf.path: leaf.params for leaf in split}, specs))
        given, second = run({leaf.path: arrays[leaf.path] for leaf in split}, second)
        arrays |= given
        error = error._replace(second=updated(error.second, second))
        return _like(reduced, leaves, [arrays[leaf.path] for leaf in leaves]), error

    def measure(self, sums: Tree, weight: jax.Array, error: ErrorState) -> QuantisationLoss:
        """Return the loss of `reduce` for these sums, in a separate program: metrics cross all axes as float32."""
        leaves = leaves_of(sums, self.layout, self.axis, replicated=True)
        arrays = {leaf.path: self._array(x) for leaf, x in zip(leaves, _leaves(sums), strict=True) if not leaf.exact}
        leaves = [leaf for leaf in leaves if not leaf.exact]
        kept = arrays_of(error.first, leaves)
        codec, mesh = self.config.first_codec(), self.layout.mesh
        splits = {leaf.path: (*self.layout.mesh_axes(leaf.axes, self.layout.params), self.axis) for leaf in leaves}
        shards = {path: prod(mesh.shape[name] for name in split) for path, split in splits.items()}

        def on_device(values, weight, kept):
            sums = jnp.zeros(3)
            for path, value in values.items():
                waiting = load(kept[path]).reshape(value.shape) if path in kept else jnp.zeros_like(value)
                whole = (value.astype(jnp.float32) * (self.lanes / weight) + waiting).reshape(1, -1)
                sent = codec.decode(codec.encode(whole), whole.shape[-1])
                squares = [jnp.sum(jnp.square(x)) for x in (whole - sent, whole, waiting)]
                sums += jnp.stack(squares) * (shards[path] / mesh.size)
            return jax.lax.psum(sums, tuple(mesh.axis_names))

        specs = {leaf.path: PartitionSpec(self.axis, *leaf.params) for leaf in leaves}
        in_specs = specs, PartitionSpec(), {path: specs[path] for path in kept}
        run = self.layout.shard_map(on_device, in_specs, PartitionSpec())
        lost, whole, waiting = run(arrays, weight, kept)
        return QuantisationLoss(jnp.sqrt(lost / whole), jnp.sqrt(waiting))

    def norm(self, reduced: Tree) -> jax.Array:
        """Return the L2 norm of a tree under `opt_state`; the bytes of one float32 cross `axis`."""
        layout = self.layout
        leaves = leaves_of(reduced, layout, self.axis, replicated=False)
        splits = [layout.mesh_axes(leaf.axes, layout.opt_state) for leaf in leaves]
        copies = [layout.mesh.size // prod(layout.mesh.shape[name] for name in split) for split in splits]

        def on_device(shards):
            squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) / n for x, n in zip(shards, copies, strict=True)]
            inside = jax.lax.psum(sum(squares, start=jnp.zeros(())), self.fast_axes)
            return totals([inside], self.axis)[0]

        specs = [leaf.opt_state for leaf in leaves]
        run = layout.shard_map(on_device, (specs,), PartitionSpec())
        return jnp.sqrt(run([self._array(x) for x in _leaves(reduced)]))

    # The traffic in closed form, from the codecs' own bytes: an all-to-all's operand, an all-gather's result.

    def reduce_transfers(self, tree: Tree) -> list[Transfer]:
        """Return the transfers of `reduce` for a tree of arrays without the axis."""
        leaves = leaves_of(tree, self.layout, self.axis, replicated=False)
        arrays, config = [leaf for leaf in leaves if not leaf.exact], self.config
        first = self._message_bytes(config.first_codec(), arrays)
        second = self._message_bytes(config.second_codec(), [leaf for leaf in arrays if leaf.split is None])
        scalars = self.lanes * EXACT.message_bytes(len(leaves) - len(arrays))
        return [
            Transfer("first phase", "all-to-all", (self.axis,), first),
            Transfer("second phase", "all-gather", (self.axis,), second),
            Transfer("scalars", "all-gather", (self.axis,), scalars),
            *self._finite_transfers((config.codec, first), (config.gather_codec, second)),
        ]

    def gather_transfers(self, tree: Tree) -> list[Transfer]:
        """Return the transfers of `all_gather_params` for a tree of arrays without the axis."""
        leaves = leaves_of(tree, self.layout, self.axis, replicated=False)
        second = self._message_bytes(self.config.second_codec(), [leaf for leaf in leaves if leaf.split is not None])
        finite = self._finite_transfers((self.config.gather_codec, second))
        return [Transfer("second phase", "all-gather", (self.axis,), second), *finite]

    def measure_transfers(self, totals: int) -> list[Transfer]:
        """Return the transfers for the total of some scalars, and for a norm."""
        return [
            Transfer("totals", "all-gather", (self.axis,), totals * FLOAT32 * self.lanes),
            Transfer("norm", "all-gather", (self.axis,), FLOAT32 * self.lanes),
            Transfer("norm", "all-reduce", self.fast_axes, FLOAT32),
        ]

    def bytes_sent(self, tree: Tree) -> int:
        """Return the bytes that a device sends over `axis` to reduce and gather a tree, without totals and norm."""
        transfers = [*self.reduce_transfers(tree), *self.gather_transfers(tree)]
        return (self.lanes - 1) * sum(each.bytes for each in transfers if each.axes == (self.axis,)) // self.lanes

    def _message_bytes(self, codec: Codec, leaves: list[ShardedLeaf]) -> int:
        return self.lanes * sum(codec.message_bytes(leaf.piece_size) for leaf in leaves)

    def _finite_transfers(self, *phases: tuple[str, int]) -> list[Transfer]:
        """Return the transfers of finiteness flags of phases (name of the codec, bytes) with feedback.

        A flag is a number inside a replica, and a byte from each replica over the axis.
        """
        flags = sum(self.config.feedback is not None and codec != "none" and sent > 0 for codec, sent in phases)
        return [
            Transfer("finite", "all-gather", (self.axis,), self.lanes * flags),
            Transfer("finite", "all-reduce", self.fast_axes, FLOAT32 * flags),
        ]

    @property
    def lanes(self) -> int:
        return self.layout.axis(self.axis).size

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """Return the other mesh axes, except those of size 1."""
        return tuple(axis for axis, size in self.layout.mesh.shape.items() if axis != self.axis and size > 1)

    def _phase(self, codec: Codec) -> CollectivePhase:
        feedback = self.config.feedback
        return CollectivePhase(codec, feedback.beta if feedback else 0.0, self.axis, self.fast_axes)

    def _reduce_on_device(self, leaves: list[ShardedLeaf], values: dict, weight: jax.Array, errors: tuple):
        """Turn local sums by path, total weight and (first, second) errors into averages by path, and the errors."""
        first, second = errors
        arrays = [leaf for leaf in leaves if not leaf.exact]
        exact = [leaf.path for leaf in leaves if leaf.exact]
        sums = totals([values[path] for path in exact], self.axis) if exact else []
        averages = {path: summed / weight for path, summed in zip(exact, sums, strict=True)}
        if arrays:
            scale = self.lanes / weight
            scaled = {leaf.path: values[leaf.path].astype(jnp.float32) * scale for leaf in arrays}
            pieces, first = reduce_scatter_phase(arrays, scaled, first, self._phase(self.config.first_codec()))
            averages |= {leaf.path: pieces[leaf.path].reshape(leaf.piece_shape) for leaf in arrays}
        whole = [leaf for leaf in arrays if leaf.split is None]
        if whole:
            joined, second = all_gather_phase(whole, averages, second, self._phase(self.config.second_codec()))
            averages |= joined
        return averages, first, second

    def _array(self, leaf) -> jax.Array:
        """Return a leaf's array, with the axis first if it has it."""
        if not isinstance(leaf, NamedArray):
            return leaf
        return leaf.rearrange((self.axis, ...)).array if self.axis in leaf.axis_names else leaf.array


Reducer = ExactReducer | QuantisedReducer


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=is_named)


def _like(tree: Tree, leaves: list[ShardedLeaf], arrays: list[jax.Array]) -> Tree:
    """Return the arrays in the structure of the tree, with the axes of the leaves."""
    wrapped = [leaf.wrap(array) for leaf, array in zip(leaves, arrays, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_named), wrapped)
