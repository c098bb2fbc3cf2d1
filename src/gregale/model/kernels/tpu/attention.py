"""The kernels of attention for TPU: their grid, the forward and the backward pass. They import Pallas.

Arrays are [batch, heads, position, size]. A grid is (batch, head, pair), with the pairs of `pairs.py`. Queries are
scaled so that q . k is a score in units of log 2: weights are powers of two, without a product for each of them.

It keeps the largest score of each query so far, and the sum of the weights relative to that and their sum with values.

- `fused` takes for each block of keys the queries of all heads of its group. It keeps the gradients by queries of the
  group: positions * group * size values
- `split` has two kernels, for rows of which these sums do not fit
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gregale.model.kernels.tpu.attention_block_grid import EDGE, WHOLE, Pairs, Step, Table
from gregale.model.kernels.tpu.blocks import LANES, Block

LOG_2 = log(2)
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a score; finite, because a row may see no key of a block
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a b^T
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))  # a b


@dataclass(frozen=True)
class Kernel:
    """What the kernels of one call have in common.

    - `pairs`, `block`: the division of the sequence
    - `cap`: see `Attend`
    - `vector_memory`: bytes of a kernel's share; None: the compiler's own
    """

    pairs: Pairs
    block: Block
    cap: float | None
    interpret: bool
    vector_memory: int | None = None

    def products(self, kind: int, distance: int) -> list[tuple[slice, slice]]:
        """Return the queries and keys of the parts in which a pair is computed, without queries that see none."""
        size, keys = self.block.size, self.block.compute if kind == WHOLE else self.block.diagonal
        found = []
        for first in range(0, size, keys):
            ahead = distance * size - first  # of the keys
            stop = (
                size if kind != EDGE else min(size, -(-((self.pairs.window or 0) - ahead + keys - 1) // LANES) * LANES)
            )
            if (start := max(0, -ahead)) < stop:
                found.append((slice(start, stop), slice(first, first + keys)))
        return found

    @property
    def limit(self) -> float | None:
        """Return the cap in the unit of scores."""
        return None if self.cap is None else self.cap / LOG_2

    def capped(self, scores):
        return scores if self.limit is None else self.limit * jnp.tanh(scores / self.limit)

    def visible(self, kind: int, distance: int, queries: slice, keys: slice, keys_first: bool):
        """Return the mask of a part, without segments; None: all."""
        if kind == WHOLE:
            return None
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        by_query, by_key = (1, 0) if keys_first else (0, 1)
        shape = shape[::-1] if keys_first else shape
        back = jax.lax.broadcasted_iota(jnp.int32, shape, by_query) - jax.lax.broadcasted_iota(jnp.int32, shape, by_key)
        ahead = distance * self.pairs.size + queries.start - keys.start
        seen = [back >= -ahead] * (distance == 0) + [back < (self.pairs.window or 0) - ahead] * (kind == EDGE)
        return seen[0] if len(seen) == 1 else seen[0] & seen[1]

    def each_case(self, step: Step, compute: Callable[[int, int], None]) -> None:
        """Run the code of the pair's kind and, of an edge, its distance."""
        for kind, distance in self.pairs.cases:
            found = step.kind == kind
            pl.when(found & (step.distance == distance) if kind == EDGE else found)(partial(compute, kind, distance))

    def call(self, name: str, body: Callable, table: Table, inputs, outputs, scratch) -> list[jax.Array]:
        """Run a kernel over batch, the heads of its last output, and the pairs of a table.

        `inputs` are (array, block, index), `outputs` (shape, dtype, block, index). The counts of the table become
        metadata, for `gregale.cost.pallas_cost`.
        """
        arrays, *parts = zip(*inputs, strict=True)
        specs = [None if x is None else pl.BlockSpec(*each) for x, *each in zip(arrays, *parts, strict=True)]
        batch, heads = outputs[-1][0][:2]
        counts = {"block_q": self.block.size, **{each: batch * heads * count for each, count in table.counts.items()}}
        with jax.named_scope(name):
            return pl.pallas_call(
                body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(batch, heads, table.counts["steps"]),
                    in_specs=specs,
                    out_specs=[pl.BlockSpec(block, index) for _, _, block, index in outputs],
                    scratch_shapes=scratch,
                ),
                out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _, _ in outputs],
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=self.vector_memory
                ),
                name=name,
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps(counts)},
            )(table.words, *arrays)


def spread(ids, lanes: int = LANES):
    """Turn a row of values [1, n] into columns [n, lanes]."""
    return jnp.broadcast_to(ids, (lanes, ids.shape[-1])).T


def wide(columns, width: int):
    """Repeat columns [n, LANES] to [n, width]."""
    return columns[:, :width] if width <= LANES else jnp.tile(columns, (1, -(-width // LANES)))[:, :width]


def masked(scores, *masks):
    """Hide the scores that a mask does not show; None shows all."""
    for mask in masks:
        scores = scores if mask is None else jnp.where(mask, scores, HIDDEN)
    return scores


def dot(a, b, dimensions=ROWS_BY_COLUMNS):
    """Return the product of two blocks in float32."""
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def block_indices(group: int):
    """Return the block indices of queries and of keys for a grid (batch, head, pair)."""

    def of_q(row, head, pair, table):
        return row, head, Step.of(table, pair).row, 0

    def of_kv(row, head, pair, table):
        return row, jax.lax.div(head, group), Step.of(table, pair).key, 0

    return of_q, of_kv


def lanes_of(of_q):
    """Return the block index of [batch, head, 1, position] by that of queries."""

    def index(*at):
        row, head, place, _ = of_q(*at)
        return row, head, 0, place

    return index


def segment_inputs(ids, size: int, of_q, of_kv):
    """Return the segments of queries and keys as inputs of a kernel, a row of lanes each."""
    if ids is None:
        return [(None, None, None)] * 2
    maps = ((lambda *at, place=place: (at[0], 0, place(*at)[2])) for place in (of_q, of_kv))
    return [(x[:, None], (None, 1, size), place) for x, place in zip(ids, maps, strict=True)]


def columns_of(ids, size: int):
    """Return the scratch for the segments of a block as columns, which `spread` makes."""
    return None if ids is None else pltpu.VMEM((size, LANES), jnp.int32)


def forward(kernel: Kernel, q, k, v, ids, largest: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return softmax(q k^T) v, log2 of the sum of 2^scores, and if asked the largest scores.

    The last two are float32 [batch, heads, position].

    - `ids`: segments of queries and of keys, int32 [batch, position] each; None: one segment
    """
    batch, heads, length, width = q.shape
    size = kernel.block.size
    of_q, of_kv = block_indices(heads // k.shape[1])
    block, row = (None, None, size, width), (None, None, 1, size)
    of_queries = ((batch, heads, 1, length), jnp.float32, row, lanes_of(of_q))
    out, exponent, *top = kernel.call(
        "splash_mha_fwd",
        partial(_forward, kernel, largest),
        kernel.pairs.by_rows(),
        [(q, block, of_q), (k, block, of_kv), (v, block, of_kv), *segment_inputs(ids, size, of_q, of_kv)],
        [(q.shape, q.dtype, block, of_q), *[of_queries] * (1 + largest)],
        [*[pltpu.VMEM((size, LANES), jnp.float32)] * 2, pltpu.VMEM((size, width), jnp.float32), columns_of(ids, size)],
    )
    return out, exponent[:, :, 0], top[0][:, :, 0] if top else None


def _forward(kernel: Kernel, largest: bool, table, q, k, v, q_ids, k_ids, out, exponent, *others):
    highest, top, total, sums, columns = others if largest else (None, *others)
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
        if highest is not None:
            highest[...] = top[...].T[:1]


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
