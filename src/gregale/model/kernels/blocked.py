"""Causal attention by those pairs of blocks that the mask does not hide, also of sequences that devices share."""

from dataclasses import dataclass
from functools import cache, partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gregale.axes.layout import CONTEXT
from gregale.axes.parameters import chunk_order, chunks_reached
from gregale.model.kernels.operations import ATTENTION_NAME, capped, halo, sink_gradients, whole, with_sinks

# Rows of a block, queries or keys. On a CPU the scores of a head and sequence stay in its second-level cache.
ROWS, CPU_ROWS = 512, 128
MOST_BLOCKS = 1024  # of a sequence: pairs are a constant of the program
HIDDEN = -1e30  # a score; finite, because a row may see no key of a block


def attend(q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
    """Compute what `Attend` says for whole sequences, in blocks of about `CPU_ROWS` rows.

    Rows are padded to whole blocks with tokens after all others, which no token sees. All is computed in float32: CPUs
    have no faster products, and the derivative by a score subtracts a sum over the output, which is then not rounded.
    """
    return attend_with_largest(q, k, v, segments, window, cap, sinks)[0]


def attend_with_largest(q, k, v, segments, window: int | None, cap: float | None = None, sinks=None):
    """Return `attend` and the largest scores, see `AttendWithLargest`."""
    dtype, length = q.dtype, q.shape[1]
    blocks = Blocks.of_sequence(length, CPU_ROWS, window)
    q, k, v = (_padded(x.astype(jnp.float32), blocks) for x in (q, k, v))
    ids = None if segments is None else (_padded(segments, blocks),) * 2
    sinks = None if sinks is None else _padded(sinks, blocks)
    found: Any = attend_blocks(blocks, cap, q, k, v, ids, jnp.asarray(pairs_of(blocks)[0]), sinks)
    output, largest = found
    output = output if output.shape[1] == length else output[:, :length]  # a slice would be saved beside it
    return output.astype(dtype), largest[:, :length]


def _padded(x: jax.Array, blocks: "Blocks") -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, blocks.count * blocks.size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


@dataclass(frozen=True)
class Blocks:
    """The division of a sequence.

    - `size`: positions of a block
    - `count`: blocks of a chunk
    - `devices`: n, that share 2n chunks; 1: the sequence is one chunk
    - `window`: see `Attend`
    - `reach`: chunks before each chunk of the device that the keys begin with (`halo`); None: keys of all
    """

    size: int
    count: int
    devices: int
    window: int | None
    reach: int | None = None

    @staticmethod
    def of_sequence(length: int, rows: int, window: int | None) -> "Blocks":
        """Return the fewest equal blocks of at most `rows` positions, or `MOST_BLOCKS` of more.

        The last one may end after the sequence.
        """
        count = -(-length // max(rows, -(-length // MOST_BLOCKS)))
        return Blocks(-(-length // count), count, 1, window)

    @staticmethod
    def of_chunks(chunk: int, devices: int, rows: int, window: int | None, reach: int | None) -> "Blocks":
        """Return the blocks of chunks of `chunk` positions: equal ones whose size is nearest to `rows` by its ratio."""
        most = max(1, MOST_BLOCKS // (2 * devices))
        counts = (count for count in range(1, min(chunk, most) + 1) if chunk % count == 0)
        count = min(counts, key=lambda count: abs(log(chunk / count / rows)))
        return Blocks(chunk // count, count, devices, window, reach)

    def pairs(self) -> np.ndarray:
        """Return the pairs of blocks with visible scores: int32 [device, pair, 4].

        A pair is the query block's number on the device, the key block's number among its keys, and the first position
        of each. With a window some devices have fewer pairs; pairs without visible scores fill up their rows.
        """
        order = chunk_order(self.devices) if self.devices > 1 else np.zeros(1, int)
        natural = (order[:, None] * self.count + np.arange(self.count)).reshape(-1)  # block numbers, as held
        gathered, own = np.argsort(natural), len(natural) // self.devices

        def held(row: int, block: int, key: int) -> int:
            if self.reach is None:
                return gathered[key]
            return row + (1 + row // self.count) * self.reach * self.count - (block - key)

        reach = len(natural) if self.window is None else -(-(self.window - 1) // self.size)
        found = [
            [
                (row, held(row, block, key), block * self.size, key * self.size)
                for row, block in enumerate(natural[device * own : (device + 1) * own])
                for key in range(max(0, block - reach), block + 1)
            ]
            for device in range(self.devices)
        ]
        most = max(map(len, found))
        nothing = (0, 0, 0, len(natural) * self.size)
        return np.array([[*pairs, *[nothing] * (most - len(pairs))] for pairs in found], np.int32)

    def cut(self, x: jax.Array) -> jax.Array:
        """Turn [batch, position, ...] into [block, batch, row, ...]."""
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.size, *x.shape[2:]), 1, 0)

    def joined(self, x: jax.Array) -> jax.Array:
        """Invert `cut`."""
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


@cache
def pairs_of(blocks: Blocks) -> np.ndarray:
    """Return `Blocks.pairs`, computed once for all layers and programs."""
    return blocks.pairs()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_blocks(blocks: Blocks, cap: float | None, q, k, v, ids, pairs: jax.Array, sinks=None):
    """Return what `Attend` says for the queries of a device, and their largest scores [batch, position, heads].

    - `q`: [batch, position of the device, heads, head_size]
    - `k`, `v`: [batch, position, kv_heads, head_size], positions in the order that `pairs` numbers them in
    - `ids`: the segments of the queries, and those of whole sequences in their own order; None: one segment
    - `pairs`: those of the device, see `Blocks.pairs`
    - `sinks`: [batch, position of the device, heads, 1]
    """
    return _attend_forward(blocks, cap, q, k, v, ids, pairs, sinks)[0]


def _attend_forward(blocks: Blocks, cap, q, k, v, ids, pairs, sinks):
    """Compute softmax(s) . v block by block, with the largest score of a row so far and its sums relative to that."""
    heads = _Heads(blocks, cap, q, k, ids)
    queries, keys, values = heads.queries(q), heads.keys(k), heads.keys(v)

    def add(sums, pair):
        row, key = pair[0], pair[1]
        scores = heads.seen(heads.scores(_block(queries, row), _block(keys, key)), pair)
        top, total, output = (_block(x, row) for x in sums)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        total = total * shrink + jnp.sum(weights, axis=-1)
        output = output * shrink[..., None] + _float32_einsum("bkgst,bktd->bkgsd", weights, _block(values, key))
        return tuple(_with_block(x, row, new) for x, new in zip(sums, (higher, total, output), strict=True)), None

    rows = queries.shape[:-1]
    start = jnp.full(rows, HIDDEN), jnp.zeros(rows), jnp.zeros(queries.shape)
    (top, total, output), _ = jax.lax.scan(add, start, pairs)
    sinks = None if sinks is None else heads.queries(sinks)
    output, exponent = with_sinks(output / total[..., None], top + jnp.log(total), sinks)
    output = checkpoint_name(heads.rows(output).astype(q.dtype), ATTENTION_NAME)
    exponent = checkpoint_name(exponent, ATTENTION_NAME)  # log of the sum of exp(scores)
    return (output, heads.rows(top[..., None])[..., 0]), (q, k, v, ids, pairs, sinks, output, exponent)


def _attend_backward(blocks: Blocks, cap, saved, cotangents):
    """Compute dv = p^T do, dq = ds k, dk = ds^T q, with weights p, ds = p (do v^T - sum(do o)) / sqrt(size).

    With a cap c, ds has the factor 1 - (s / c)^2, where s is capped. dk and dv are computed transposed, q^T ds and
    do^T p, so that no matrix of weights is transposed.
    """
    q, k, v, ids, pairs, sinks, output, exponent = saved
    cotangent, _ = cotangents
    heads = _Heads(blocks, cap, q, k, ids)
    queries, keys, values = heads.queries(q), heads.keys(k), heads.keys(v)
    by_output = heads.queries(cotangent)
    along = jnp.sum(by_output.astype(jnp.float32) * heads.queries(output).astype(jnp.float32), axis=-1)

    def add(sums, pair):
        row, key = pair[0], pair[1]
        own, out = _block(queries, row), _block(by_output, row)
        theirs, value = _block(keys, key), _block(values, key)
        scores = heads.scores(own, theirs)
        weights = jnp.exp(heads.seen(scores, pair) - _block(exponent, row)[..., None])
        by_weights = _float32_einsum("bkgsd,bktd->bkgst", out, value)
        by_scores = weights * (by_weights - _block(along, row)[..., None]) * heads.scale
        by_scores = by_scores if cap is None else by_scores * (1 - jnp.square(scores / cap))
        addends = (
            (row, _float32_einsum("bkgst,bktd->bkgsd", by_scores, theirs)),
            (key, _float32_einsum("bkgsd,bkgst->bkdt", own, by_scores)),
            (key, _float32_einsum("bkgsd,bkgst->bkdt", out, weights)),
        )
        added = (_with_block(x, at, _block(x, at) + more) for x, (at, more) in zip(sums, addends, strict=True))
        return tuple(added), None

    start = tuple(jnp.zeros(x.shape) for x in (queries, keys.swapaxes(-1, -2), values.swapaxes(-1, -2)))
    (by_q, by_k, by_v), _ = jax.lax.scan(add, start, pairs)
    found = heads.rows(by_q), *(blocks.joined(x.transpose(0, 1, 4, 2, 3)) for x in (by_k, by_v))
    by_sinks = sink_gradients(sinks, exponent, along)
    return *(x.astype(q.dtype) for x in found), None, None, by_sinks if by_sinks is None else heads.rows(by_sinks)


attend_blocks.defvjp(_attend_forward, _attend_backward)


class _Heads:
    """The arrays of attention by block and head, and their scores."""

    def __init__(self, blocks: Blocks, cap: float | None, q: jax.Array, k: jax.Array, ids):
        self.scale = q.shape[-1] ** -0.5
        self._blocks, self._cap, self._kv_heads = blocks, cap, k.shape[2]
        self._ids = None if ids is None else tuple(map(blocks.cut, ids))

    def queries(self, x: jax.Array) -> jax.Array:
        """Turn [batch, position, heads, size] into [block, batch, kv_heads, heads / kv_heads, row, size]."""
        x = self._blocks.cut(x)
        return x.reshape(*x.shape[:3], self._kv_heads, -1, x.shape[-1]).transpose(0, 1, 3, 4, 2, 5)

    def rows(self, x: jax.Array) -> jax.Array:
        """Invert `queries`."""
        x = x.transpose(0, 1, 4, 2, 3, 5)
        return self._blocks.joined(x.reshape(*x.shape[:3], -1, x.shape[-1]))

    def keys(self, x: jax.Array) -> jax.Array:
        """Turn [batch, position, kv_heads, size] into [block, batch, kv_heads, row, size]."""
        return self._blocks.cut(x).swapaxes(2, 3)

    def scores(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the capped q . k / sqrt(size) of two blocks: [batch, kv_heads, heads / kv_heads, query, key]."""
        return capped(_float32_einsum("bkgsd,bktd->bkgst", queries, keys) * self.scale, self._cap)

    def seen(self, scores: jax.Array, pair: jax.Array) -> jax.Array:
        """Return the scores of a pair of blocks, `HIDDEN` for keys that are not visible."""
        places = jnp.arange(self._blocks.size)
        back = (pair[2] - pair[3]) + places[:, None] - places
        seen = back >= 0
        if self._blocks.window is not None:
            seen &= back < self._blocks.window
        if self._ids is not None:
            own, others = self._ids
            theirs = _block(others, pair[3] // self._blocks.size)
            seen = seen & (_block(own, pair[0])[:, :, None] == theirs[:, None, :])[:, None, None]
        return jnp.where(seen, scores, HIDDEN)


def _block(x: jax.Array, number: jax.Array) -> jax.Array:
    """Return a block of [block, ...]; `x[number]` would add operations for numbers below zero."""
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)


def _with_block(x: jax.Array, number: jax.Array, block: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, number, 0, allow_negative_indices=False)


def _float32_einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Gathered:
    """An `Attend` inside of `jax.shard_map`: all arrays are the positions of one device.

    Keys and values are gathered, or with a window sent by the neighbours that it reaches (`chunks_reached`). A device
    computes equally many pairs of blocks as each other device (`axes.position_order`).

    - `devices`: n, that share a sequence
    - `rows`: of a block, about
    """

    devices: int
    rows: int

    def __call__(self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
        return self.with_largest(q, k, v, segments, window, cap, sinks)[0]

    def with_largest(
        self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the attention and the largest scores, see `AttendWithLargest`."""
        chunk = q.shape[1] // 2
        reach = chunks_reached(chunk, self.devices, window)
        blocks = Blocks.of_chunks(chunk, self.devices, self.rows, window, reach)
        if reach is None:
            gather = partial(jax.lax.all_gather, axis_name=CONTEXT, axis=1, tiled=True)
        else:
            gather = partial(halo, devices=self.devices, reach=reach)
        ids = None if segments is None else (segments, whole(segments, self.devices))
        pairs = jnp.asarray(pairs_of(blocks))[jax.lax.axis_index(CONTEXT)]
        found: Any = attend_blocks(blocks, cap, q, gather(k), gather(v), ids, pairs, sinks)
        return found
