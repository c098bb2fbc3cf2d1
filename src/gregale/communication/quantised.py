"""The average over `replica` through codecs: shards in rows of blocks, two phases of collectives, and error feedback.

The first of two phases (`reduce`) is an all-to-all of shards, which every replica decodes and averages in float32: a
reduce-scatter. The second (`all_gather_params`) is an all-gather of values computed from the averages. Integers are
never summed, and all replicas decode the same bytes, so replicas stay equal to the last bit. Each phase sends the
arrays of a tree as one message, for one latency instead of one per array. A message is small, an eighth of the tree at
4 bits. With one phase everybody gets all messages, and averages them alone.

The module also has the programs that a member of a group runs for a row, on its processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import REPLICA, Layout, Tree, is_layers, is_named
from gregale.codecs.codec import Codec, FloatCodec, QuantisedArray, ReduceConfig, load, store, stored_block
from gregale.communication.reduce import ExactReducer, ShardedLeaf, leaves_of


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
        if config.second != "none":
            axes = replicated if leaf.split is None else leaf.axes
            second[leaf.path] = _zeros(axes, layout, second_mapping(layout, axis))
    return ErrorState(first, second, jnp.zeros((), jnp.int32))


def _zeros(axes: tuple[Axis, ...], layout: Layout, mapping) -> QuantisedArray:
    if is_layers(axes[-1].name):  # a fragment has some of the layers, so blocks cannot span them
        axes = (*axes, Axis("value", 1))
    *others, last = axes
    block = stored_block(last.size // layout.cut_into((last,), mapping))
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


Arrays = dict[str, jax.Array]  # by the path of the leaf
Errors = dict[str, QuantisedArray]  # the same; empty without feedback
EXACT = FloatCodec("none")


class Encoded(NamedTuple):
    """Values and their message."""

    message: jax.Array  # uint8 [..., bytes]
    compensated: Arrays  # [..., n]: the values with the errors
    kept: Arrays  # [..., n]: the next errors, of values with an error


class CollectivePhase(NamedTuple):
    """The settings of a phase."""

    codec: Codec  # encodes the messages
    beta: float  # decay of the kept error
    axis: str  # the mesh axis it crosses, `replica` or `island`
    fast_axes: tuple[str, ...]  # the other mesh axes


def reduce_scatter_phase(
    leaves: list[ShardedLeaf], values: Arrays, errors: Errors, phase: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Return shards [per device, piece_size] of the means of local arrays [per device, *shape], and the next errors.

    `per device` counts the replicas on a device.
    """
    pieces = {leaf.path: jax.vmap(leaf.to_replica_shards)(values[leaf.path]) for leaf in leaves}
    waiting = {leaf: load(errors[leaf.path]) for leaf in leaves if leaf.path in errors}
    kept = {leaf.path: jax.vmap(leaf.to_replica_shards)(error) for leaf, error in waiting.items()}
    message, kept, finite = _send(pieces, kept, phase)  # [per device, replicas, bytes]
    decoded = decode_all(_exchanged(message, phase.axis), [leaf.piece_size for leaf in leaves], phase.codec)
    means = {leaf.path: jnp.mean(rows, axis=0) for leaf, rows in zip(leaves, decoded, strict=True)}
    whole = {leaf.path: jax.vmap(leaf.from_replica_shards)(kept[leaf.path]) for leaf in waiting}
    return means, remember(errors, whole, finite)


def _exchanged(message: jax.Array, axis: str) -> jax.Array:
    """Turn [per device, replicas, bytes], by sender and receiver, into [replicas, per device, bytes]."""
    each, replicas, size = message.shape
    by_device = jnp.moveaxis(message.reshape(each, replicas // each, each * size), 1, 0)
    received = jax.lax.all_to_all(by_device.reshape(replicas // each, -1), axis, 0, 0, tiled=True)
    return received.reshape(replicas, each, size)


def single_phase(
    leaves: list[ShardedLeaf], values: Arrays, errors: Errors, phase: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Return the means [*shape] of local arrays [per device, *shape] over all replicas, and the next errors.

    An all-gather brings every replica's messages to all.
    """
    flat = {path: value.reshape(value.shape[0], -1) for path, value in values.items()}
    waiting = {leaf.path: load(errors[leaf.path]) for leaf in leaves if leaf.path in errors}
    kept = {path: error.reshape(error.shape[0], -1) for path, error in waiting.items()}
    message, kept, finite = _send(flat, kept, phase)  # [per device, bytes]
    gathered = jax.lax.all_gather(message, phase.axis, tiled=True)
    decoded = decode_all(gathered, [prod(leaf.shape) for leaf in leaves], phase.codec)
    means = {leaf.path: jnp.mean(rows, axis=0).reshape(leaf.shape) for leaf, rows in zip(leaves, decoded, strict=True)}
    return means, remember(errors, kept, finite)


def all_gather_phase(
    leaves: list[ShardedLeaf], pieces: Arrays, errors: Errors, phase: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Gather all replicas' shards [per device, piece_size] to arrays [*shape]; return them and the next errors."""
    own = {leaf.path: _own_pieces(leaf, load(errors[leaf.path]), phase.axis) for leaf in leaves if leaf.path in errors}
    message, own, finite = _send({leaf.path: pieces[leaf.path] for leaf in leaves}, own, phase)
    gathered = jax.lax.all_gather(message, phase.axis, tiled=True)
    decoded = decode_all(gathered, [leaf.piece_size for leaf in leaves], phase.codec)
    wholes = {leaf.path: leaf.from_replica_shards(rows) for leaf, rows in zip(leaves, decoded, strict=True)}
    kept = {leaf.path: _among_pieces(leaf, own[leaf.path], phase.axis) for leaf in leaves if leaf.path in own}
    return wholes, remember(errors, kept, finite)


def all_reduce_scalars(arrays: list[jax.Array], axis: str) -> list[jax.Array]:
    """Return exact sums over `axis` of float32 arrays [per device, ...], over their first axis too.

    Their bytes are gathered and added in one order everywhere.
    """
    unravel = ravel_pytree([array[0] for array in arrays])[1]
    values = jax.vmap(lambda row: ravel_pytree(row)[0])(arrays)
    rows = EXACT.decode(jax.lax.all_gather(EXACT.encode(values), axis, tiled=True), values.shape[1])  # [replica, value]
    return unravel(jnp.sum(rows, axis=0))


def encode_all(arrays: Sequence[jax.Array], codec: Codec) -> jax.Array:
    """Encode arrays [..., n_i] to uint8 [..., sum of message_bytes(n_i)], their messages one after the other.

    Every array has its own blocks. The barrier prevents the compiler from sending the arrays instead of the message.
    """
    message = jnp.concatenate([codec.encode(array) for array in arrays], axis=-1)
    return jax.lax.optimization_barrier(message)


def decode_all(message: jax.Array, sizes: Sequence[int], codec: Codec) -> list[jax.Array]:
    """Return the arrays [..., n_i] of a message, float32; `sizes` are the n_i."""
    ends = list(accumulate(codec.message_bytes(size) for size in sizes))
    parts = jnp.split(message, ends[:-1], axis=-1)
    return [codec.decode(part, size) for part, size in zip(parts, sizes, strict=True)]


def encoded(values: Arrays, errors: Arrays, codec: Codec, beta: float) -> Encoded:
    """Encode one message of values + errors, all [..., n]; used by every kind of reducer.

    h = x + e        message = encode(h)        e = next_error(e, h - decode(message))        by the codec
    """
    sizes = [value.shape[-1] for value in values.values()]
    compensated = {path: value + errors[path] if path in errors else value for path, value in values.items()}
    message = encode_all(list(compensated.values()), codec)
    if not errors:
        return Encoded(message, compensated, {})
    sent = dict(zip(values, decode_all(message, sizes, codec), strict=True))
    kept = {path: codec.next_error(errors[path], compensated[path] - sent[path], beta) for path in errors}
    return Encoded(message, compensated, kept)


def _send(values: Arrays, errors: Arrays, phase: CollectivePhase) -> tuple[jax.Array, Arrays, jax.Array]:
    """Return the message of values + errors, all [..., n], the next errors, and whether all values are finite."""
    message, compensated, kept = encoded(values, errors, phase.codec, phase.beta)
    return message, kept, _all_finite(compensated, phase) if errors else jnp.array(True)


def _all_finite(values: Arrays, phase: CollectivePhase) -> jax.Array:
    """Return whether the values of all devices are finite; one byte crosses the slow axis."""
    here = jnp.stack([jnp.all(jnp.isfinite(value)) for value in values.values()]).all()
    in_replica = jax.lax.pmin(here.astype(jnp.int32), phase.fast_axes).astype(jnp.uint8)
    return jnp.all(jax.lax.all_gather(in_replica, phase.axis) == 1)


def remember(errors: Errors, new: Arrays, finite: jax.Array) -> Errors:
    """Return the new errors in 8 bits; the old ones if the sent values were not finite."""

    def one(old: QuantisedArray, error: jax.Array) -> QuantisedArray:
        stored = store(error.reshape(old.codes.shape), old.codes.shape[-1] // old.scales.shape[-1])
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), stored, old)

    return {path: one(errors[path], error) for path, error in new.items()}


def _own_pieces(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """Turn a second phase's error on a device into [per device, piece_size]."""
    if leaf.split is None:
        return jax.vmap(lambda whole, index: leaf.to_replica_shards(whole)[index])(error, _indices(leaf, axis))
    return leaf.to_own_shards(error)


def _among_pieces(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """Invert `_own_pieces`; of an unsplit array, zero outside each replica's shard."""
    if leaf.split is None:
        zeros = jnp.zeros((leaf.replicas, leaf.piece_size))
        of_one = jax.vmap(lambda own, index: leaf.from_replica_shards(zeros.at[index].set(own)))
        return of_one(error, _indices(leaf, axis))
    return leaf.from_own_shards(error)


def _indices(leaf: ShardedLeaf, axis: str) -> jax.Array:
    """Return the numbers of a device's replicas."""
    return jax.lax.axis_index(axis) * leaf.per_device + jnp.arange(leaf.per_device)


class QuantisationLoss(NamedTuple):
    relative_error: jax.Array  # float32 []: |h - decode(encode(h))| / |h|, over all replicas, with h = g + e
    error_norm: jax.Array  # float32 []: |e|, over all replicas; 0 without feedback


@dataclass(frozen=True)
class QuantisedReducer:
    """Averages a tree over `axis` through the codecs of `config`; see `communication.reduce.ExactReducer`.

    `opt_state` of the layout splits an array no further than `params` does, but over `axis`; with one phase not at all.
    """

    layout: Layout
    config: ReduceConfig
    axis: str = REPLICA  # or `island`

    quantised: ClassVar[Literal[True]] = True

    def init(self, tree: Tree) -> ErrorState:
        """Return a zero error, for a tree of arrays without the axis."""
        return init_error(tree, self.layout, self.config, self.axis)

    def shardings(self, error: ErrorState) -> ErrorState:
        return error_shardings(error, self.layout, self.axis)

    def all_reduce_scalars(self, *arrays: NamedArray) -> list[jax.Array]:
        """Return exact sums over the axis of [replica, ...] arrays: the bytes of float32 values cross it."""

        def on_device(arrays):
            return all_reduce_scalars(arrays, self.axis)

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
        averaged in the same way, and gathered by the second phase's codec. With one phase they are averages of whole
        messages. Scalars are exact, as the bytes of float32.
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
            values = {leaf.path: shard for leaf, shard in zip(leaves, shards, strict=True)}
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
            pieces = {leaf.path: leaf.to_own_shards(shards[leaf.path].astype(jnp.float32)) for leaf in split}
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
                whole = (value.astype(jnp.float32) * (self.lanes / weight) + waiting).reshape(value.shape[0], -1)
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
            return all_reduce_scalars([inside[None]], self.axis)[0]

        specs = [leaf.opt_state for leaf in leaves]
        run = layout.shard_map(on_device, (specs,), PartitionSpec())
        return jnp.sqrt(run([self._array(x) for x in _leaves(reduced)]))

    # Bytes that a device sends over the axis, by the codecs' own sizes.

    def bytes_sent(self, tree: Tree) -> int:
        """Return the bytes that a device sends over `axis` to reduce and gather a tree, without totals and norm.

        Replicas that share a device count as if each had its own.

        - `tree`: arrays without the axis, or their abstract forms
        """
        return self._share(sum(self._phases(tree)) + self._messages_to_gather(tree))

    def reduce_bytes(self, tree: Tree) -> int:
        """Return the part of `bytes_sent` that `reduce` sends."""
        return self._share(sum(self._phases(tree)))

    def gather_bytes(self, tree: Tree) -> int:
        """Return the part of `bytes_sent` that `all_gather_params` sends."""
        return self._share(self._messages_to_gather(tree))

    def _share(self, size: int) -> int:
        return (self.lanes - 1) * size // self.lanes

    def _phases(self, tree: Tree) -> tuple[int, ...]:
        """Return the bytes of all lanes' messages of `reduce`: both phases, scalars, and flags of finiteness."""
        leaves = leaves_of(tree, self.layout, self.axis, replicated=False)
        arrays, config = [leaf for leaf in leaves if not leaf.exact], self.config
        first = self._message_bytes(config.first_codec(), arrays)
        if config.phases == 1:
            first = self.lanes * sum(config.first_codec().message_bytes(prod(leaf.shape)) for leaf in arrays)
        whole = [leaf for leaf in arrays if leaf.split is None and config.phases == 2]
        second = self._message_bytes(config.second_codec(), whole)
        scalars = self.lanes * EXACT.message_bytes(len(leaves) - len(arrays))
        return first, second, scalars, self._flags((config.codec, first), (config.second, second))

    def _messages_to_gather(self, tree: Tree) -> int:
        """Return the bytes of all lanes' messages of `all_gather_params`, with their flags of finiteness."""
        leaves = leaves_of(tree, self.layout, self.axis, replicated=False)
        second = self._message_bytes(self.config.second_codec(), [leaf for leaf in leaves if leaf.split is not None])
        return second + self._flags((self.config.second, second))

    def _flags(self, *phases: tuple[str, int]) -> int:
        """Return the bytes of flags of finiteness, one of each lane in a phase (codec, bytes) with feedback."""
        own = self.config.feedback is not None
        return self.lanes * sum(own and codec != "none" and sent > 0 for codec, sent in phases)

    def _message_bytes(self, codec: Codec, leaves: list[ShardedLeaf]) -> int:
        return self.lanes * sum(codec.message_bytes(leaf.piece_size) for leaf in leaves)

    @property
    def lanes(self) -> int:
        return self.layout.axis(self.axis).size

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """Return the other mesh axes, except those of size 1."""
        return tuple(axis for axis, size in self.layout.mesh.shape.items() if axis != self.axis and size > 1)

    def _phase(self, codec: Codec) -> CollectivePhase:
        return CollectivePhase(codec, self.config.beta, self.axis, self.fast_axes)

    def _reduce_on_device(self, leaves: list[ShardedLeaf], values: dict, weight: jax.Array, errors: tuple):
        """Turn local sums by path, total weight and (first, second) errors into averages by path, and the errors."""
        first, second = errors
        arrays = [leaf for leaf in leaves if not leaf.exact]
        exact = [leaf.path for leaf in leaves if leaf.exact]
        sums = all_reduce_scalars([values[path] for path in exact], self.axis) if exact else []
        averages = {path: summed / weight for path, summed in zip(exact, sums, strict=True)}
        if arrays:
            scale = self.lanes / weight
            scaled = {leaf.path: values[leaf.path].astype(jnp.float32) * scale for leaf in arrays}
            phase = self._phase(self.config.first_codec())
            if self.config.phases == 1:
                means, first = single_phase(arrays, scaled, first, phase)
                return averages | means, first, second
            pieces, first = reduce_scatter_phase(arrays, scaled, first, phase)
            averages |= {
                leaf.path: pieces[leaf.path] if leaf.split is None else leaf.from_own_shards(pieces[leaf.path])
                for leaf in arrays
            }
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


ROW_VALUES = 1 << 16  # 256 kB of float32; a row is decoded in one call


class RowLayout(NamedTuple):
    """A shard's values as equal rows; the last one is padded with zeros.

    A row is a whole number of blocks of the codecs, so that no block holds values of two rows. One row has the shard's
    own number of values.
    """

    size: int  # values of the shard
    count: int  # rows
    row: int  # values of a row
    exact: bool = False  # whether they are sent as float32 with any codec, as scalars are

    def to_rows(self, values: jax.Array) -> jax.Array:
        """Turn [size] into [count, row]."""
        return jnp.pad(values, (0, self.count * self.row - self.size)).reshape(self.count, self.row)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Turn [count, row] into [size]."""
        return rows.reshape(-1)[: self.size]

    def first_codec(self, config: ReduceConfig) -> Codec:
        return EXACT if self.exact else config.first_codec()

    def second_codec(self, config: ReduceConfig) -> Codec:
        return EXACT if self.exact else config.second_codec()


def rows_of(size: int, config: ReduceConfig, exact: bool = False, max_values: int = ROW_VALUES) -> RowLayout:
    """Return the equal rows of a shard of `size` values, at most about `max_values` each; whole blocks if several."""
    count = max(1, -(-size // max_values))
    if count == 1:
        return RowLayout(size, 1, size, exact)
    row = -(-size // (count * config.block_size)) * config.block_size
    return RowLayout(size, -(-size // row), row, exact)


class RowPrograms(NamedTuple):
    """The compiled programs of a member for a row, for the processor: one set for each length of rows."""

    size: int  # values of a row
    add: Callable[..., Any]  # (sum [size], message, weight) -> sum + weight * decode(message)
    encode: Callable[..., Any]  # (sum, total weight, error or None) -> message of the average, next error or None
    decode: Callable[..., Any]  # message -> the values that all members get, [size]
    keeps_error: bool


@lru_cache(maxsize=4096)
def row_programs(first: Codec, second: Codec, beta: float | None, size: int) -> RowPrograms:
    """Return the programs for rows of `size` values; `beta`: of the second phase's feedback, None without."""

    def add(total: jax.Array, message: jax.Array, weight: jax.Array) -> jax.Array:
        return total + weight * first.decode(message, size)

    def encode(total: jax.Array, weight: jax.Array, error: QuantisedArray | None):
        values, errors = {"row": total / weight}, {} if error is None else {"row": load(error)}
        message, compensated, kept = encoded(values, errors, second, beta or 0.0)
        if error is None:
            return message, None
        finite = jnp.all(jnp.isfinite(compensated["row"]))
        return message, remember({"row": error}, kept, finite)["row"]

    def decode(message: jax.Array) -> jax.Array:
        return second.decode(message, size)

    return RowPrograms(size, jax.jit(add), jax.jit(encode), jax.jit(decode), beta is not None)


def no_error(size: int) -> QuantisedArray:
    return QuantisedArray(np.zeros(size, np.uint8), np.zeros(size // stored_block(size), jnp.bfloat16))
