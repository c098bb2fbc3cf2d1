"""What the kernels of attention for TPU share: their grid, the parts of a pair of blocks, and masks.

Arrays are [batch, heads, position, size]. A grid is (batch, head, pair), with the pairs of `pairs.py`. Queries are
scaled so that q . k is a score in units of log 2: weights are powers of two, without a product for each of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gregale.model.kernels.tpu.blocks import LANES, Block
from gregale.model.kernels.tpu.pairs import EDGE, WHOLE, Pairs, Step, Table

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
        metadata, for `gregale.audit.pallas_cost`.
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
