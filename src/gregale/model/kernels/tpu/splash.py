"""Causal attention by JAX's splash kernels for TPU, which store no scores and skip masked blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import CONTEXT
from gregale.axes.position_order import chunk_order, chunks_reached
from gregale.model.kernels.gathered import Gathered
from gregale.model.kernels.kernels import ATTENTION_NAME
from gregale.model.kernels.shared_keys import neighbourhood, neighbourhood_of, whole
from gregale.model.kernels.tpu.blocks import LANES, Blocks, blocks_for, shared_blocks


@dataclass(frozen=True)
class Splash:
    """An `Attend` for any length and any head size.

    Rows are padded to whole blocks with tokens after all others, which no token sees. The kernel names its residuals,
    output and log-sum-exp: if they are saved, it does not run again.

    Of sequences that several devices share, all arrays are the positions of one device, inside of `jax.shard_map`. Keys
    and values are gathered, or with a window sent by the neighbours that it reaches (`chunks_reached`). A chunk that is
    no multiple of `LANES` takes the form without a kernel.
    """

    device_kind: str  # JAX's name of the chip, which determines the sizes of blocks
    interpret: bool = False  # runs the kernels step by step in JAX, on any device
    devices: int = 1  # that share a sequence

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        window: int | None,
        cap: float | None = None,
    ) -> jax.Array:
        length, heads, head_size = q.shape[1:]
        if self.devices > 1 and length % (2 * LANES):
            return Gathered(self.devices)(q, k, v, segments, window, cap)
        if self.devices == 1:
            blocks = blocks_for(self.device_kind, length, window, head_size)
            mask, of_keys = Mask(blocks.length, (0,), blocks.length, window), segments
        else:
            blocks = shared_blocks(self.device_kind, length // 2, self.devices, window, head_size)
            mask, (k, v), segments, of_keys = _shared(self.devices, window, (k, v), segments)
        q = (q * head_size**-0.5).astype(q.dtype)
        own = mask.chunk * len(mask.starts) // mask.shards
        q, k, v = (_filled(x, size).swapaxes(1, 2) for x, size in ((q, own), (k, mask.keys), (v, mask.keys)))
        ids = None if segments is None or of_keys is None else _segment_ids((segments, own), (of_keys, mask.keys))
        attended: Any = jax.vmap(_kernel(blocks, heads, mask, cap, self.interpret))(q, k, v, ids)
        return attended.swapaxes(1, 2)[:, :length, :, :head_size]


def _shared(devices: int, window: int | None, arrays: Sequence[jax.Array], segments: jax.Array | None):
    """Return the mask of a sequence that devices share, all keys' arrays, and the segments of queries and of keys.

    Positions before the sequence have a segment of their own, -1.
    """
    rows, length = arrays[0].shape[:2]
    chunk = length // 2
    of_all = None if segments is None else whole(segments, devices)
    if (reach := chunks_reached(chunk, devices, window)) is None:
        mask = Mask(chunk, tuple((chunk_order(devices) * chunk).tolist()), devices * length, window, devices)
        return mask, [whole(x, devices) for x in arrays], segments, of_all
    mask = Mask(chunk, (reach * chunk, (2 * reach + 1) * chunk), (reach + 1) * length, window)
    if segments is None or of_all is None:
        segments, of_all = (jnp.zeros((rows, size), jnp.int32) for size in (length, devices * length))
    keys = [neighbourhood(x, devices, reach) for x in arrays]
    return mask, keys, segments, neighbourhood_of(of_all, devices, reach)


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, position, heads, size] with zeros to `length`, and to whole rows of lanes if there are several."""
    size = x.shape[-1]
    more = -size % LANES if size > LANES else 0
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, more)))


def _segment_ids(*of_queries_and_keys: tuple[jax.Array, int]):
    """Return the segments of queries and of keys, each padded to its length."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return SegmentIds(*(jnp.pad(ids, ((0, 0), (0, size - ids.shape[1]))) for ids, size in of_queries_and_keys))


@dataclass(frozen=True)
class Seen:
    """A block of scores that are all visible, or all hidden, as splash asks of an array, but ten times as fast."""

    every: bool

    def any(self) -> bool:
        return self.every

    def all(self) -> bool:
        return self.every


ALL, NONE = Seen(True), Seen(False)
SOME = np.array([[True, False]])


@dataclass(frozen=True)
class Mask:
    """Which keys queries see, as splash's masks: `mask[queries, keys]` of two slices.

    The kernel calls `mask_function`. Splash itself only asks whether some or all scores of a block are visible, which
    is computed from the ends of the two slices: a whole block takes a thousand times as long.

    - `chunk`: consecutive queries
    - `starts`: the first query's index among the keys, of each chunk
    - `keys`: number of keys
    - `window`: see `Attend`
    - `shards`: devices that have equal parts of the chunks
    """

    chunk: int
    starts: tuple[int, ...]
    keys: int
    window: int | None
    shards: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.chunk * len(self.starts), self.keys

    @property
    def q_sequence(self) -> np.ndarray:
        """Return the index among the keys of each query."""
        return np.add.outer(self.starts, np.arange(self.chunk)).reshape(-1).astype(np.int32)

    def mask_function(self, queries, keys):
        """Return whether queries see keys, by their indices among the keys."""
        seen = queries >= keys
        return seen if self.window is None else seen & (queries - keys < self.window)

    def __getitem__(self, index: tuple[slice, slice]) -> "Seen | np.ndarray":
        """Return whether any of a block's scores is visible, and whether all are."""
        queries, keys = index
        chunk, inside = divmod(queries.start, self.chunk)
        back = self.starts[chunk] + inside - keys.start
        farthest, nearest = back + queries.stop - queries.start - 1, back - (keys.stop - keys.start) + 1
        if farthest < 0 or (self.window is not None and nearest >= self.window):
            return NONE
        return ALL if nearest >= 0 and (self.window is None or farthest < self.window) else SOME


def _kernel(blocks: Blocks, heads: int, mask: Mask, cap: float | None, interpret: bool):
    """Return kernel(q [heads, position, size], k, v [kv_heads, position, size], segments), scores not scaled.

    Of a mask of several shards, it is this device's: its part of the arrays that name the blocks to compute.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Pallas takes long to import

    own = type("SplashMask", (Mask, splash.Mask), {})(**vars(mask))  # splash takes its own type only
    size, compute = blocks.size, blocks.compute
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([own] * heads),
        block_sizes=splash.BlockSizes(
            block_q=size,
            block_kv=size,
            block_kv_compute=compute,
            block_q_dkv=size,
            block_kv_dkv=blocks.backward,
            block_kv_dkv_compute=compute,
            block_q_dq=None if blocks.fused else size,
            block_kv_dq=None if blocks.fused else size,
            use_fused_bwd_kernel=blocks.fused,
        ),
        head_shards=1,
        q_seq_shards=mask.shards,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=ATTENTION_NAME,
        interpret=interpret,
    )
    return kernel if mask.shards == 1 else jax.tree.map(partial(_own_part, mask.shards), kernel)


def _own_part(devices: int, array: jax.Array) -> jax.Array:
    """Return this device's part of an array of splash's masks: [heads, queries' blocks, ...], or [queries]."""
    axis = min(1, array.ndim - 1)
    size = array.shape[axis] // devices
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(CONTEXT) * size, size, axis)
