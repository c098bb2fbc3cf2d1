"""Causal attention by JAX's splash kernels for TPU, which store no scores and skip masked blocks."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import CONTEXT
from gregale.axes.position_order import chunk_order, position_order
from gregale.model.kernels.gathered import Gathered
from gregale.model.kernels.kernels import ATTENTION_NAME
from gregale.model.kernels.tpu.blocks import LANES, Blocks, blocks_for, shared_blocks


@dataclass(frozen=True)
class Splash:
    """An `Attend` for any length and any head size.

    Rows are padded to whole blocks with tokens after all others, which no token sees. The kernel names its residuals,
    output and log-sum-exp: if they are saved, it does not run again.

    Of sequences that several devices share, all arrays are the positions of one device, inside of `jax.shard_map`. Keys
    and values are gathered. A chunk that is no multiple of `LANES` takes the form without a kernel.
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
        else:
            blocks = shared_blocks(self.device_kind, length // 2, self.devices, window, head_size)
            k, v = (whole(x, self.devices) for x in (k, v))
        q = (q * head_size**-0.5).astype(q.dtype)
        own = blocks.length // self.devices
        q, k, v = (_filled(x, size).swapaxes(1, 2) for x, size in ((q, own), (k, blocks.length), (v, blocks.length)))
        ids = None if segments is None else _segment_ids(segments, own, self.devices, blocks.length)
        kernel = _kernel(blocks, heads, Mask(blocks.length, self.devices, window), cap, self.interpret)
        attended: Any = jax.vmap(kernel)(q, k, v, ids)
        return attended.swapaxes(1, 2)[:, :length, :, :head_size]


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, position, heads, size] with zeros to `length`, and to whole rows of lanes if there are several."""
    size = x.shape[-1]
    more = -size % LANES if size > LANES else 0
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, more)))


def _segment_ids(segments: jax.Array, own: int, devices: int, length: int):
    """Return the segments of this device's queries, padded to `own`, and of all keys, padded to `length`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    of_keys = segments if devices == 1 else whole(segments, devices)
    q, kv = (jnp.pad(ids, ((0, 0), (0, size - ids.shape[1]))) for ids, size in ((segments, own), (of_keys, length)))
    return SegmentIds(q=q, kv=kv)


def whole(x: jax.Array, devices: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into all, in the order of the sequence."""
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    held = jax.lax.all_gather(chunks, CONTEXT, axis=1, tiled=True)
    inverse = np.argsort(chunk_order(devices))
    return held.at[:, inverse].get(unique_indices=True).reshape(x.shape[0], -1, *x.shape[2:])


@dataclass(frozen=True)
class Mask:
    """Which keys the queries of all devices see, as splash's masks: `mask[queries, keys]` of two slices.

    The kernel calls `mask_function`. Splash itself only asks whether some or all scores of a block are visible, which
    is computed from the ends of the two slices: a whole block takes a thousand times as long.

    - `length`: positions of a sequence
    - `devices`, `window`: see `Splash` and `Attend`
    """

    length: int
    devices: int
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    @property
    def q_sequence(self) -> np.ndarray:
        """Return the positions of all queries, as devices hold them."""
        return position_order(self.length, self.devices).astype(np.int32)

    def mask_function(self, queries, keys):
        """Return whether queries see keys, by their positions."""
        seen = queries >= keys
        return seen if self.window is None else seen & (queries - keys < self.window)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Return whether any of a block's scores is visible, and whether all are: [1, 2]."""
        queries, keys = index
        first = self._position(queries.start)
        last, width = first + queries.stop - queries.start - 1, self.length if self.window is None else self.window
        farthest, nearest = last - keys.start, first - keys.stop + 1
        return np.array([[farthest >= 0 and nearest < width, nearest >= 0 and farthest < width]])

    def _position(self, place: int) -> int:
        """Return the position at a place of the order."""
        if self.devices == 1:
            return place
        chunk, inside = divmod(place, self.length // (2 * self.devices))
        return int(chunk_order(self.devices)[chunk]) * (self.length // (2 * self.devices)) + inside


def _kernel(blocks: Blocks, heads: int, mask: Mask, cap: float | None, interpret: bool):
    """Return kernel(q [heads, position, size], k, v [kv_heads, position, size], segments), scores not scaled.

    Of a sequence that devices share, it is this device's: its part of the arrays that name the blocks to compute.
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
        q_seq_shards=mask.devices,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=ATTENTION_NAME,
        interpret=interpret,
    )
    return kernel if mask.devices == 1 else jax.tree.map(partial(_own_part, mask.devices), kernel)


def _own_part(devices: int, array: jax.Array) -> jax.Array:
    """Return this device's part of an array of splash's masks: [heads, queries' blocks, ...], or [queries]."""
    axis = min(1, array.ndim - 1)
    size = array.shape[axis] // devices
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(CONTEXT) * size, size, axis)
