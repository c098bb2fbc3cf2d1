"""The kernel of attention's forward pass for TPU.

It keeps the largest score of each query so far, and the sum of the weights relative to that and their sum with values.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gregale.model.kernels.tpu.blocks import LANES
from gregale.model.kernels.tpu.grid import (
    HIDDEN,
    ROWS_BY_ROWS,
    Kernel,
    block_indices,
    columns_of,
    dot,
    lanes_of,
    masked,
    segment_inputs,
    spread,
    wide,
)
from gregale.model.kernels.tpu.pairs import Step


def forward(kernel: Kernel, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
    """Return softmax(q k^T) v, and log2 of the sum of 2^scores: float32 [batch, heads, position].

    - `ids`: segments of queries and of keys, int32 [batch, position] each; None: one segment
    """
    batch, heads, length, width = q.shape
    size = kernel.block.size
    of_q, of_kv = block_indices(heads // k.shape[1])
    block, row = (None, None, size, width), (None, None, 1, size)
    out, exponent = kernel.call(
        "splash_mha_fwd",
        partial(_forward, kernel),
        kernel.pairs.by_rows(),
        [(q, block, of_q), (k, block, of_kv), (v, block, of_kv), *segment_inputs(ids, size, of_q, of_kv)],
        [(q.shape, q.dtype, block, of_q), ((batch, heads, 1, length), jnp.float32, row, lanes_of(of_q))],
        [*[pltpu.VMEM((size, LANES), jnp.float32)] * 2, pltpu.VMEM((size, width), jnp.float32), columns_of(ids, size)],
    )
    return out, exponent[:, :, 0]


def _forward(kernel: Kernel, table, q, k, v, q_ids, k_ids, out, exponent, top, total, sums, columns):
    step = Step.of(table, pl.program_id(2))
    width = out.shape[-1]

    @pl.when(step.first)
    def _():
        top[...] = jnp.full_like(top, HIDDEN)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)
        if columns is not None:
            columns[...] = spread(q_ids[...])

    def add(kind: int, distance: int) -> None:
        for queries, keys in kernel.products(kind, distance):
            scores = kernel.capped(dot(q[queries], k[keys], ROWS_BY_ROWS))
            same = None if columns is None else wide(columns[queries], scores.shape[1]) == k_ids[:, keys]
            scores = masked(scores, kernel.visible(kind, distance, queries, keys, keys_first=False), same)
            before = top[queries]
            after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
            weights, shrink = jnp.exp2(scores - wide(after, scores.shape[1])), jnp.exp2(before - after)
            top[queries] = after
            lanes = [weights[:, at : at + LANES] for at in range(0, scores.shape[1], LANES)]
            total[queries] = shrink * total[queries] + sum(lanes[1:], lanes[0])
            sums[queries] = wide(shrink, width) * sums[queries] + dot(weights.astype(v.dtype), v[keys])

    kernel.each_case(step, add)

    @pl.when(step.last)
    def _():
        whole = jnp.broadcast_to(jnp.sum(total[...], axis=-1, keepdims=True), total.shape)
        out[...] = (sums[...] / wide(whole, width)).astype(out.dtype)
        exponent[...] = (top[...] + jnp.log2(whole)).T[:1]
