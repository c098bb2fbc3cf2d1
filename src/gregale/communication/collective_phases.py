"""What one device does in each leg of a quantised average; to be called inside `jax.shard_map` over the whole mesh."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gregale.codecs.codec import Codec, FloatCodec
from gregale.codecs.feedback import Stored, load, next_error, store
from gregale.codecs.message import decode_all, encode_all
from gregale.communication.replica_shards import ShardedLeaf

Arrays = dict[str, jax.Array]  # by the path of the leaf
Errors = dict[str, Stored]  # the same; empty without feedback
EXACT = FloatCodec("none")


class Encoded(NamedTuple):
    """Values as they are sent."""

    message: jax.Array  # uint8 [..., bytes]
    compensated: Arrays  # [..., n]: the values with the errors
    kept: Arrays  # [..., n]: the next errors, of those values that had one


class CollectivePhase(NamedTuple):
    """How a leg sends.

    - `codec`: what it encodes with
    - `beta`: decay of the kept error
    - `axis`: the mesh axis it crosses, `replica` or `island`
    - `fast_axes`: the other mesh axes
    """

    codec: Codec
    beta: float
    axis: str
    fast_axes: tuple[str, ...]


def reduce_scatter_phase(
    leaves: list[ShardedLeaf], values: Arrays, errors: Errors, leg: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Means over replicas of local shards [*shape], as this replica's pieces [piece_size], and the next errors."""
    pieces = {leaf.path: leaf.to_replica_shards(values[leaf.path]) for leaf in leaves}  # [replicas, piece_size]
    kept = {leaf.path: leaf.to_replica_shards(load(errors[leaf.path])) for leaf in leaves if leaf.path in errors}
    message, kept, finite = _send(pieces, kept, leg)
    received = jax.lax.all_to_all(message, leg.axis, split_axis=0, concat_axis=0, tiled=True)
    decoded = decode_all(received, [leaf.piece_size for leaf in leaves], leg.codec)
    means = {leaf.path: jnp.mean(rows, axis=0) for leaf, rows in zip(leaves, decoded, strict=True)}
    whole = {leaf.path: leaf.from_replica_shards(kept[leaf.path]) for leaf in leaves if leaf.path in kept}
    return means, remember(errors, whole, finite)


def all_gather_phase(
    leaves: list[ShardedLeaf], pieces: Arrays, errors: Errors, leg: CollectivePhase
) -> tuple[Arrays, Errors]:
    """Every replica's pieces [piece_size] brought together to local shards [*shape], and the next errors."""
    own = {leaf.path: _own_piece(leaf, load(errors[leaf.path]), leg.axis) for leaf in leaves if leaf.path in errors}
    message, own, finite = _send({leaf.path: pieces[leaf.path] for leaf in leaves}, own, leg)
    gathered = jax.lax.all_gather(message, leg.axis)
    decoded = decode_all(gathered, [leaf.piece_size for leaf in leaves], leg.codec)
    wholes = {leaf.path: leaf.from_replica_shards(rows) for leaf, rows in zip(leaves, decoded, strict=True)}
    kept = {leaf.path: _among_pieces(leaf, own[leaf.path], leg.axis) for leaf in leaves if leaf.path in own}
    return wholes, remember(errors, kept, finite)


def totals(scalars: list[jax.Array], axis: str) -> list[jax.Array]:
    """Sums over `axis` of float32 scalars, exactly: their bytes are gathered, and added in one order everywhere."""
    message = EXACT.encode(jnp.stack(scalars).astype(jnp.float32))
    rows = EXACT.decode(jax.lax.all_gather(message, axis), len(scalars))  # [replica, scalar]
    return list(jnp.sum(rows, axis=0))


def encoded(values: Arrays, errors: Arrays, codec: Codec, beta: float) -> Encoded:
    """One message of values + errors, all [..., n]; by any kind of reducer, whatever carries the message.

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


def _send(values: Arrays, errors: Arrays, leg: CollectivePhase) -> tuple[jax.Array, Arrays, jax.Array]:
    """The message of values + errors, all [..., n]; the next errors; and whether all replicas' values are finite."""
    message, compensated, kept = encoded(values, errors, leg.codec, leg.beta)
    return message, kept, _all_finite(compensated, leg) if errors else jnp.array(True)


def _all_finite(values: Arrays, leg: CollectivePhase) -> jax.Array:
    """Whether the values of all devices are finite; over the slow axis goes one byte."""
    here = jnp.stack([jnp.all(jnp.isfinite(value)) for value in values.values()]).all()
    in_replica = jax.lax.pmin(here.astype(jnp.int32), leg.fast_axes).astype(jnp.uint8)
    return jnp.all(jax.lax.all_gather(in_replica, leg.axis) == 1)


def remember(errors: Errors, new: Arrays, finite: jax.Array) -> Errors:
    """The new errors in 8 bits; the old ones if what was sent was not finite."""

    def one(old: Stored, error: jax.Array) -> Stored:
        stored = store(error.reshape(old.codes.shape))
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), stored, old)

    return {path: one(errors[path], error) for path, error in new.items()}


def _own_piece(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """A second leg's error -> [piece_size]."""
    if leaf.split is None:
        return leaf.to_replica_shards(error)[jax.lax.axis_index(axis)]
    return error.reshape(-1)


def _among_pieces(leaf: ShardedLeaf, error: jax.Array, axis: str) -> jax.Array:
    """[piece_size] -> a second leg's error; of an array that is not split, zero but for this replica's piece."""
    if leaf.split is None:
        pieces = jnp.zeros((leaf.replicas, leaf.piece_size))
        return leaf.from_replica_shards(pieces.at[jax.lax.axis_index(axis)].set(error))
    return error
