"""Causal attention by kernels for TPU, which store no scores and skip masked blocks."""

from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gregale.axes.layout import CONTEXT
from gregale.axes.position_order import chunk_order
from gregale.model.kernels.gathered import Gathered
from gregale.model.kernels.kernels import ATTENTION_NAME
from gregale.model.kernels.tpu.blocks import LANES, Blocks, blocks_for, shared_blocks
from gregale.model.kernels.tpu.pairs import Pairs


@dataclass(frozen=True)
class Splash:
    """An `Attend` for any length and any head size.

    Rows are padded to whole blocks with tokens after all others, which no token sees. The output and the log-sum-exp
    are named: if they are saved, the forward kernel does not run again.

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
        shape = length, window, head_size, heads // k.shape[2]
        if self.devices == 1:
            blocks = blocks_for(self.device_kind, *shape)
        else:
            blocks = shared_blocks(self.device_kind, self.devices, *shape)
            k, v = (whole(x, self.devices) for x in (k, v))
        q = (q * (head_size**-0.5 / log(2))).astype(q.dtype)  # scores in units of log 2
        own = blocks.length // self.devices
        q, k, v = (_filled(x, size).swapaxes(1, 2) for x, size in ((q, own), (k, blocks.length), (v, blocks.length)))
        ids = None if segments is None else _segment_ids(segments, own, self.devices, blocks.length)
        attended: Any = _attend(Call(blocks, self.devices, window, cap, self.interpret), q, k, v, ids)
        return attended.swapaxes(1, 2)[:, :length, :, :head_size]


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, position, heads, size] with zeros to `length`, and to whole rows of lanes if there are several."""
    size = x.shape[-1]
    more = -size % LANES if size > LANES else 0
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, more)))


def _segment_ids(segments: jax.Array, own: int, devices: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Return the segments of this device's queries, padded to `own`, and of all keys, padded to `length`."""
    of_keys = segments if devices == 1 else whole(segments, devices)
    q, kv = (jnp.pad(ids, ((0, 0), (0, size - ids.shape[1]))) for ids, size in ((segments, own), (of_keys, length)))
    return q, kv


def whole(x: jax.Array, devices: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into all, in the order of the sequence."""
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    held = jax.lax.all_gather(chunks, CONTEXT, axis=1, tiled=True)
    inverse = np.argsort(chunk_order(devices))
    return held.at[:, inverse].get(unique_indices=True).reshape(x.shape[0], -1, *x.shape[2:])


@dataclass(frozen=True)
class Call:
    """What the kernels of one call take beside arrays: see `Splash` and `Attend`."""

    blocks: Blocks
    devices: int
    window: int | None
    cap: float | None
    interpret: bool

    def kernel(self, forward: bool):
        """Return the kernels of the forward pass, or of the backward pass."""
        from gregale.model.kernels.tpu.grid import Kernel  # Pallas takes long to import

        blocks = self.blocks
        pairs = Pairs(blocks.length, blocks.block.size, self.devices, self.window)
        memory = blocks.working if forward else blocks.vector_memory
        return Kernel(pairs, blocks.block, self.cap, self.interpret, memory)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q, k, v, ids) -> jax.Array:
    return _attend_forward(call, q, k, v, ids)[0]


def _attend_forward(call: Call, q, k, v, ids):
    from gregale.model.kernels.tpu.forward import forward

    output, exponent = (checkpoint_name(x, ATTENTION_NAME) for x in forward(call.kernel(forward=True), q, k, v, ids))
    return output, (q, k, v, ids, output, exponent)


def _attend_backward(call: Call, saved, cotangent):
    from gregale.model.kernels.tpu.backward import fused, split

    q, k, v, ids, output, exponent = saved
    along = jnp.sum(output.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    gradients = fused if call.blocks.fused else split
    return *gradients(call.kernel(forward=False), q, k, v, ids, exponent, along, cotangent), None


_attend.defvjp(_attend_forward, _attend_backward)
