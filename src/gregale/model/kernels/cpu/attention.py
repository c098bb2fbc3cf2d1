"""Causal attention in blocks of rows, each with its visible keys."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.kernels import ATTENTION_NAME
from gregale.model.kernels.reference import capped

MOST_BLOCKS = 4
FEWEST_ROWS = 128  # in a block; for shorter ones the copies cost more than the products save


class Block(NamedTuple):
    """Rows `start:stop`, which see keys from `first` to `stop`."""

    start: int
    stop: int
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.stop)


def blocks(length: int, window: int | None) -> Iterator[Block]:
    """Yield up to `MOST_BLOCKS` blocks of equal size, the last one shorter if the length is not a multiple."""
    count = max(1, min(MOST_BLOCKS, length // FEWEST_ROWS))
    size = -(-length // count)
    for start in range(0, length, size):
        first = 0 if window is None else max(0, start - window + 1)
        yield Block(start, min(start + size, length), first)


class Shown(NamedTuple):
    """The mask and the cap of scores: see `Attend`."""

    window: int | None
    cap: float | None


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: int | None, cap: float | None = None
) -> jax.Array:
    return _attend(q, k, v, segments, Shown(window, cap))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, shown: Shown) -> jax.Array:
    return _attend_forward(q, k, v, segments, shown)[0]


def _attend_forward(q, k, v, segments, shown):
    q, k, v = _grouped(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    attended, exponents = [], []
    for block in blocks(k.shape[2], shown.window):
        scores = _seen(capped(_scores(q, k, block), shown.cap), segments, shown.window, block)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        sums = _float32_einsum("bkgst,bktd->bkgsd", weights, v[:, :, block.keys])
        attended.append(sums / total)
        exponents.append(top + jnp.log(total))
    output = _ungrouped(jnp.concatenate(attended, axis=3)).astype(q.dtype)
    output = checkpoint_name(output, ATTENTION_NAME)
    exponent = checkpoint_name(jnp.concatenate(exponents, axis=3), ATTENTION_NAME)  # log of the sum of exp(scores)
    return output, (q, k, v, segments, exponent)


def _attend_backward(shown: Shown, saved, cotangent):
    """Compute dv = p^T do, dq = ds k, dk = ds^T q, with weights p, dp = do v^T, ds = p (dp - sum(p dp)) / sqrt(size).

    With a cap c, ds has the factor 1 - (s / c)^2, where s is capped.

    dv and dk are computed transposed, do^T p and q^T ds, so that no matrix of weights is transposed. The sum equals
    that of do * o, but o is rounded to the dtype of activations.
    """
    q, k, v, segments, exponent = saved
    cotangent = _grouped(cotangent, k.shape[1])
    by_q, by_k, by_v = [], jnp.float32(0), jnp.float32(0)
    for block in blocks(k.shape[2], shown.window):
        scores = capped(_scores(q, k, block), shown.cap)
        weights = jnp.exp(_seen(scores, segments, shown.window, block) - exponent[..., block.rows, :])
        by_output = cotangent[..., block.rows, :]
        by_weights = _float32_einsum("bkgsd,bktd->bkgst", by_output, v[:, :, block.keys])
        along = jnp.sum(weights * by_weights, axis=-1, keepdims=True)
        by_scores = weights * (by_weights - along) * q.shape[-1] ** -0.5
        by_scores = by_scores if shown.cap is None else by_scores * (1 - jnp.square(scores / shown.cap))
        by_q.append(_float32_einsum("bkgst,bktd->bkgsd", by_scores, k[:, :, block.keys]))
        around = ((0, 0), (0, 0), (0, 0), (block.first, k.shape[2] - block.stop))
        by_k += jnp.pad(_float32_einsum("bkgsd,bkgst->bkdt", q[..., block.rows, :], by_scores), around)
        by_v += jnp.pad(_float32_einsum("bkgsd,bkgst->bkdt", by_output, weights), around)
    by_q = _ungrouped(jnp.concatenate(by_q, axis=3))
    by_k, by_v = (x.transpose(0, 3, 1, 2) for x in (by_k, by_v))
    return *(x.astype(q.dtype) for x in (by_q, by_k, by_v)), None


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Turn [batch, position, heads, size] into [batch, kv_heads, heads / kv_heads, position, size]."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)


def _ungrouped(x: jax.Array) -> jax.Array:
    batch, kv_heads, group, length, size = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, size)


def _scores(q, k, block: Block) -> jax.Array:
    """Return q . k / sqrt(size): [batch, kv_heads, heads / kv_heads, row, key] of a block."""
    scores = _float32_einsum("bkgsd,bktd->bkgst", q[..., block.rows, :], k[:, :, block.keys])
    return scores * q.shape[-1] ** -0.5


def _seen(scores, segments: jax.Array | None, window: int | None, block: Block) -> jax.Array:
    """Return the scores of a block, -inf for keys that are not visible."""
    shape = (block.stop - block.start, block.stop - block.first)
    back = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    back += block.start - block.first
    seen = back >= 0
    if window is not None:
        seen &= back < window
    if segments is not None:
        rows, keys = segments[:, block.rows], segments[:, block.keys]
        seen = seen & (rows[:, None, None, :, None] == keys[:, None, None, None, :])
    return jnp.where(seen, scores, -jnp.inf)


def _float32_einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


_attend.defvjp(_attend_forward, _attend_backward)
