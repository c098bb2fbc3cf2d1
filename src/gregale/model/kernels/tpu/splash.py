"""Causal attention by kernels for TPU, which store no scores and skip masked blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gregale.axes.parameters import chunks_reached
from gregale.model.kernels.blocked import ROWS, Gathered
from gregale.model.kernels.operations import ATTENTION_NAME, halo, halo_of, sink_gradients, whole, with_sinks
from gregale.model.kernels.tpu.attention_block_grid import Pairs
from gregale.model.kernels.tpu.blocks import LANES, Blocks, blocks_for, shared_blocks


@dataclass(frozen=True)
class Splash:
    """An `Attend` for any length and any head size.

    Rows are padded to whole blocks with tokens after all others, which no token sees. The output and the log-sum-exp
    are named: if they are saved, the forward kernel does not run again.

    Of sequences that several devices share, all arrays are the positions of one device, inside of `jax.shard_map`. Keys
    and values are gathered, or with a window sent by the neighbours that it reaches (`chunks_reached`). A chunk that is
    no multiple of `LANES` takes the form without a kernel.
    """

    device_kind: str  # JAX's name of the chip, which determines the sizes of blocks
    interpret: Any = False  # runs the kernels step by step in JAX, on any device; or how Pallas simulates a TPU
    devices: int = 1  # that share a sequence

    def __call__(self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None) -> jax.Array:
        return self._attended(q, k, v, segments, window, cap, sinks, largest=False)[0]

    def with_largest(
        self, q, k, v, segments, window: int | None, cap: float | None = None, sinks=None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the attention and the largest scores, see `AttendWithLargest`."""
        return self._attended(q, k, v, segments, window, cap, sinks, largest=True)

    def _attended(
        self, q, k, v, segments, window: int | None, cap: float | None, sinks, largest: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        length, heads, head_size = q.shape[1:]
        if self.devices > 1 and length % (2 * LANES):
            return Gathered(self.devices, ROWS).with_largest(q, k, v, segments, window, cap, sinks)
        shape = length, window, head_size, heads // k.shape[2]
        reach, of_keys = chunks_reached(length // 2, self.devices, window), segments
        if self.devices == 1:
            blocks = blocks_for(self.device_kind, *shape)
        else:
            blocks = shared_blocks(self.device_kind, self.devices, *shape)
            blocks = blocks if reach is None else replace(blocks, length=(reach + 1) * length)
            (k, v), segments, of_keys = _shared(self.devices, reach, (k, v), segments)
        q = (q * (head_size**-0.5 / log(2))).astype(q.dtype)  # scores in units of log 2
        own = blocks.length if self.devices == 1 else length
        q, k, v = (_filled(x, size).swapaxes(1, 2) for x, size in ((q, own), (k, blocks.length), (v, blocks.length)))
        sinks = None if sinks is None else _filled(sinks, own).swapaxes(1, 2)
        ids = None if segments is None or of_keys is None else _segment_ids((segments, own), (of_keys, blocks.length))
        devices, before = (self.devices, None) if reach is None else (1, reach * length // 2)
        call = Call(blocks, devices, before, window, cap, largest, self.interpret)
        found: Any = _attend(call, q, k, v, ids, sinks)
        attended, top = found
        top = None if top is None else log(2) * top.swapaxes(1, 2)[:, :length]
        return attended.swapaxes(1, 2)[:, :length, :, :head_size], top


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, position, heads, size] with zeros to `length`, and to whole rows of lanes if there are several."""
    size = x.shape[-1]
    more = -size % LANES if size > LANES else 0
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, more)))


def _shared(devices: int, reach: int | None, arrays: Sequence[jax.Array], segments: jax.Array | None):
    """Return keys' arrays of a sequence that devices share, and the segments of queries and of keys.

    Positions before the sequence have a segment of their own, -1.
    """
    of_all = None if segments is None else whole(segments, devices)
    if reach is None:
        return [whole(x, devices) for x in arrays], segments, of_all
    rows, length = arrays[0].shape[:2]
    if segments is None or of_all is None:
        segments, of_all = (jnp.zeros((rows, size), jnp.int32) for size in (length, devices * length))
    keys = [halo(x, devices, reach) for x in arrays]
    return keys, segments, halo_of(of_all, devices, reach)


def _segment_ids(*of_queries_and_keys: tuple[jax.Array, int]) -> tuple[jax.Array, jax.Array]:
    """Return the segments of queries and of keys, each padded to its length."""
    q, kv = (jnp.pad(ids, ((0, 0), (0, size - ids.shape[1]))) for ids, size in of_queries_and_keys)
    return q, kv


@dataclass(frozen=True)
class Call:
    """What the kernels of one call take beside arrays: see `Splash` and `Attend`.

    - `devices`: whose queries share the keys
    - `before`: keys before each of the device's two chunks; None: the keys are those of the whole sequence
    - `largest`: whether the forward pass also returns the largest scores
    """

    blocks: Blocks
    devices: int
    before: int | None
    window: int | None
    cap: float | None
    largest: bool
    interpret: bool

    def kernel(self, forward: bool):
        """Return the kernels of the forward pass, or of the backward pass."""
        from gregale.model.kernels.tpu.attention import Kernel  # Pallas takes long to import

        blocks = self.blocks
        size = blocks.block.size
        before = None if self.before is None else self.before // size
        pairs = Pairs(blocks.length, size, self.devices, self.window, before)
        memory = blocks.working if forward else blocks.vector_memory
        return Kernel(pairs, blocks.block, self.cap, self.interpret, memory)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q, k, v, ids, sinks):
    return _attend_forward(call, q, k, v, ids, sinks)[0]


def _attend_forward(call: Call, q, k, v, ids, sinks):
    from gregale.model.kernels.tpu.attention import forward

    output, exponent, top = forward(call.kernel(forward=True), q, k, v, ids, call.largest)
    if sinks is not None:
        output, exponent = with_sinks(output, log(2) * exponent, sinks)
        exponent = exponent / log(2)
    output, exponent = (checkpoint_name(x, ATTENTION_NAME) for x in (output, exponent))
    return (output, top), (q, k, v, ids, sinks, output, exponent)


def _attend_backward(call: Call, saved, cotangents):
    from gregale.model.kernels.tpu.attention import Inputs, fused, split

    q, k, v, ids, sinks, output, exponent = saved
    cotangent, _ = cotangents
    along = jnp.sum(output.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    gradients = fused if call.blocks.fused else split
    found = gradients(call.kernel(forward=False), Inputs(q, k, v, ids, exponent, along, cotangent))
    return *found, None, sink_gradients(sinks, log(2) * exponent, along)


_attend.defvjp(_attend_forward, _attend_backward)
