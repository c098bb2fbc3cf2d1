"""Causal attention of sequences that several devices share: keys and values are sent, queries stay."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from gregale.axes.layout import CONTEXT
from gregale.axes.parameters import chunks_reached
from gregale.model.kernels.blocked import Blocks, attend_blocks, pairs_of
from gregale.model.kernels.shared_keys import halo, whole


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

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        window: int | None,
        cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        chunk = q.shape[1] // 2
        reach = chunks_reached(chunk, self.devices, window)
        blocks = Blocks.of_chunks(chunk, self.devices, self.rows, window, reach)
        if reach is None:
            gather = partial(jax.lax.all_gather, axis_name=CONTEXT, axis=1, tiled=True)
        else:
            gather = partial(halo, devices=self.devices, reach=reach)
        ids = None if segments is None else (segments, whole(segments, self.devices))
        pairs = jnp.asarray(pairs_of(blocks))[jax.lax.axis_index(CONTEXT)]
        return attend_blocks(blocks, cap, q, gather(k), gather(v), ids, pairs, sinks)
