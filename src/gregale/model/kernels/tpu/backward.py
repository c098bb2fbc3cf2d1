"""The kernels of attention's backward pass for TPU.

- `fused` takes for each block of keys the queries of all heads of its group. It keeps the gradients by queries of the
  group: positions * group * size values
- `split` has two kernels, for rows of which these sums do not fit
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gregale.model.kernels.tpu.grid import (
    LOG_2,
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


class Inputs(NamedTuple):
    """The arrays that the kernels read.

    - `q`, `k`, `v`, `ids`, `exponent`: see `forward`
    - `along`: the sum of output * cotangent over size, float32 [batch, heads, position]
    - `by_output`: the cotangent of the output
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    ids: tuple[jax.Array, jax.Array] | None
    exponent: jax.Array
    along: jax.Array
    by_output: jax.Array

    def blocks(self, size: int, of_q: Callable, of_kv: Callable) -> list:
        """Return each array with its block's shape and index; a block has `size` positions of one head."""
        block, row = (None, None, size, self.q.shape[-1]), (None, None, 1, size)
        arrays = [(self.q, of_q), (self.k, of_kv), (self.v, of_kv), (self.by_output, of_q)]
        rows = [(x[:, :, None], row, lanes_of(of_q)) for x in (self.exponent, self.along)]
        return [*((x, block, at) for x, at in arrays), *rows, *segment_inputs(self.ids, size, of_q, of_kv)]


def fused(kernel: Kernel, inputs: Inputs):
    """Return the gradients by q, k and v."""
    return _by_keys(kernel, inputs, with_q=True)


def split(kernel: Kernel, inputs: Inputs):
    """Return the gradients as `fused` does, by two kernels."""
    by_kv = _by_keys(kernel, inputs, with_q=False)
    return _by_queries(kernel, inputs), *by_kv


def _by_keys(kernel: Kernel, inputs: Inputs, with_q: bool):
    q, k = inputs.q, inputs.k
    length, width = q.shape[2:]
    size, pairs = kernel.block.size, kernel.pairs
    group = q.shape[1] // k.shape[1]

    def of_q(row, head, pair, table):
        step = Step.of(table, pair)
        return row, head * group + step.head, step.row, 0

    def of_kv(row, head, pair, table):
        return row, head, Step.of(table, pair).key, 0

    def of_output(row, head, pair, table):
        found = Step.of(table, pair).output
        return row, head * group + jax.lax.div(found, pairs.rows), jax.lax.rem(found, pairs.rows), 0

    block, sums = (None, None, size, width), pltpu.VMEM((size, width), jnp.float32)
    return kernel.call(
        "splash_mha_fused" if with_q else "splash_mha_dkv",
        partial(_backward_by_keys, kernel, with_q),
        pairs.by_keys(group),
        inputs.blocks(size, of_q, of_kv),
        [(q.shape, q.dtype, block, of_output)] * with_q + [(k.shape, k.dtype, block, of_kv)] * 2,
        [pltpu.VMEM((group * length, width), jnp.float32)] * with_q + [sums, sums, columns_of(inputs.ids, size)],
    )


def _gradients(kernel: Kernel, queries, keys, q, k, v, by_output, exponent, along, *masks):
    """Return the weights and the gradients by scores of a part: [key, query]."""
    raw = dot(k[keys], q[queries], ROWS_BY_ROWS)
    scores = kernel.capped(raw)
    weights = jnp.exp2(masked(scores, *masks) - exponent[:, queries])
    by_weights = dot(v[keys], by_output[queries], ROWS_BY_ROWS)
    by_scores = (by_weights - along[:, queries]) * weights
    if kernel.limit is not None:
        by_scores = by_scores * (1 - jnp.square(scores / kernel.limit))
    return weights, by_scores


def _backward_by_keys(kernel: Kernel, with_q: bool, table, q, k, v, by_output, exponent, along, q_ids, k_ids, *refs):
    *by_q, by_k, by_v = refs[: 2 + with_q]  # by queries: one array, or none
    *q_sums, k_sums, v_sums, columns = refs[2 + with_q :]
    step, size = Step.of(table, pl.program_id(2)), kernel.block.size
    at = pl.multiple_of((step.head * kernel.pairs.rows + step.row) * size, size)

    @pl.when(step.first)
    def _():
        k_sums[...] = jnp.zeros_like(k_sums)
        v_sums[...] = jnp.zeros_like(v_sums)
        if columns is not None:
            columns[...] = spread(k_ids[...])

    @pl.when(step.opens)
    def _():
        for sums in q_sums:
            sums[pl.ds(at, size)] = jnp.zeros((size, q.shape[-1]), jnp.float32)

    def add(kind: int, distance: int) -> None:
        for queries, keys in kernel.products(kind, distance):
            count = queries.stop - queries.start
            seen = kernel.visible(kind, distance, queries, keys, keys_first=True)
            same = None if columns is None else wide(columns[keys], count) == q_ids[:, queries]
            weights, by_scores = _gradients(kernel, queries, keys, q, k, v, by_output, exponent, along, seen, same)
            v_sums[keys] += dot(weights.astype(v.dtype), by_output[queries])
            by_scores = by_scores.astype(q.dtype)
            k_sums[keys] += dot(by_scores, q[queries])
            for sums in q_sums:
                sums[pl.ds(at + queries.start, count)] += dot(by_scores.T, k[keys])

    kernel.each_case(step, add)

    @pl.when(step.last)
    def _():
        by_k[...] = (LOG_2 * k_sums[...]).astype(by_k.dtype)
        by_v[...] = v_sums[...].astype(by_v.dtype)

    @pl.when(step.closes)
    def _():
        for sums, written in zip(q_sums, by_q, strict=True):
            written[...] = (LOG_2 * sums[pl.ds(at, size)]).astype(written.dtype)


def _by_queries(kernel: Kernel, inputs: Inputs):
    q, size = inputs.q, kernel.block.size
    of_q, of_kv = block_indices(q.shape[1] // inputs.k.shape[1])
    (found,) = kernel.call(
        "splash_mha_dq",
        partial(_backward_by_queries, kernel),
        kernel.pairs.by_rows(),
        inputs.blocks(size, of_q, of_kv),
        [(q.shape, q.dtype, (None, None, size, q.shape[-1]), of_q)],
        [pltpu.VMEM((size, q.shape[-1]), jnp.float32)],
    )
    return found


def _backward_by_queries(kernel: Kernel, table, q, k, v, by_output, exponent, along, q_ids, k_ids, by_q, sums):
    step = Step.of(table, pl.program_id(2))

    @pl.when(step.first)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def add(kind: int, distance: int) -> None:
        for queries, keys in kernel.products(kind, distance):
            seen = kernel.visible(kind, distance, queries, keys, keys_first=True)
            same = None if q_ids is None else spread(k_ids[:, keys])[:, :1] == q_ids[:, queries]
            _, by_scores = _gradients(kernel, queries, keys, q, k, v, by_output, exponent, along, seen, same)
            sums[queries] += dot(by_scores.T.astype(k.dtype), k[keys])

    kernel.each_case(step, add)

    @pl.when(step.last)
    def _():
        by_q[...] = (LOG_2 * sums[...]).astype(by_q.dtype)
