"""The work of one device in each phase of a quantised average; call it inside `jax.shard_map` over the whole mesh."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from gregale.codecs.codec import Codec, FloatCodec
from gregale.codecs.feedback import QuantisedArray, load, next_error, store
from gregale.communication.replica_shards import ShardedLeaf

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
    """Return this replica's shards [piece_size] of the means of local arrays [*shape], and the next errors."""
    pieces = {leaf.path: leaf.to_replica_shards(values[leaf.path]) for leaf in leaves}  # [replicas, piece_size]
    kept = {leaf.path: leaf.to_replica_shards(load(errors[leaf.path])) for leaf in leaves if leaf.path in errors}
    message, kept, finite = _send(pieces, kept, phase)
    received = jax.lax.all_to_all(message, phase.axis, split_axis=0, concat_axis=0, tiled=True)
    decoded = decode_all(received, [leaf.piece_size for leaf in leaves], phase.codec)
    means = {leaf.path: jnp.mean(rows, axis=0) for leaf, rows in zip(leaves, decoded, strict=True)}
    whole = {leaf.path: leaf.from_replica_shards(kept[leaf.path]) for leaf in leaves if leaf.path in kept}
    return means, remember(errors, whole, finite)


def all_gather_phase(
    leaves: list[ShardedLeaf], pieces: Arrays, errors: Errors, phase: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Gather all replicas' shards [piece_size] to local arrays [*shape]; return them and the next errors."""
    own = {leaf.path: _own_piece(leaf, load(errors[leaf.path]), phase.axis) for leaf in leaves if leaf.path in errors}
    message, own, finite = _send({leaf.path: pieces[leaf.path] for leaf in leaves}, own, phase)
    gathered = jax.lax.all_gather(message, phase.axis)
    decoded = decode_all(gathered, [leaf.piece_size for leaf in leaves], phase.codec)
    wholes = {leaf.path: leaf.from_replica_shards(rows) for leaf, rows in zip(leaves, decoded, strict=True)}
    kept = {leaf.path: _among_pieces(leaf, own[leaf.path], phase.axis) for leaf in leaves if leaf.path in own}
    return wholes, remember(errors, kept, finite)


def totals(arrays: list[jax.Array], axis: str) -> list[jax.Array]:
    """Return exact sums over `axis` of float32 arrays: their bytes are gathered and added in one order everywhere."""
    values, unravel = ravel_pytree(arrays)
    rows = EXACT.decode(jax.lax.all_gather(EXACT.encode(values), axis), values.size)  # [replica, value]
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

    h = x + e        message = encode(h)        e = beta e + (1 - beta) (h - decode(message))
    """
    sizes = [value.shape[-1] for value in values.values()]
    compensated = {path: value + errors[path] if path in errors else value for path, value in values.items()}
    message = encode_all(list(compensated.values()), codec)
    if not errors:
        return Encoded(message, compensated, {})
    sent = dict(zip(values, decode_all(message, sizes, codec), strict=True))
    kept = {path: next_error(errors[path], compensated[path] - sent[path], beta) for path in errors}
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
        stored = store(error.reshape(old.codes.shape))
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), stored, old)

    return {path: one(errors[path], error) for path, error in new.items()}


def _own_piece(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """Turn a second phase's error into [piece_size]."""
    if leaf.split is None:
        return leaf.to_replica_shards(error)[jax.lax.axis_index(axis)]
    return error.reshape(-1)


def _among_pieces(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """Turn [piece_size] into a second phase's error; of an unsplit array, zero outside this replica's shard."""
    if leaf.split is None:
        pieces = jnp.zeros((leaf.replicas, leaf.piece_size))
        return leaf.from_replica_shards(pieces.at[jax.lax.axis_index(axis)].set(error))
    return error
