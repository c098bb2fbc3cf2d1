"""Grouped-query attention with rotary embeddings, and its key/value cache."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear

from gregale.axes.layout import BATCH
from gregale.model.config import LlamaConfig
from gregale.model.execution import Execution, named
from gregale.model.norm import RmsNorm
from gregale.model.rotary import rotate

POSITION = "position"
ORDER = (BATCH, POSITION, ..., "head_size")  # of the arrays that attention takes


class Cache(eqx.Module):
    """Keys and values of the tokens so far, for generation; stacked over layers in a model's cache.

    Slots at and after the number of tokens so far hold nothing; attention masks them.
    """

    key: NamedArray  # [Batch, Slot, KvHeads, HeadSize]
    value: NamedArray  # [Batch, Slot, KvHeads, HeadSize]

    @staticmethod
    def empty(config: LlamaConfig, Batch: Axis, slots: int, dtype) -> Cache:
        axes = (config.Layers, Batch, Axis("slot", slots), config.KvHeads, config.HeadSize)
        return Cache(hax.zeros(axes, dtype), hax.zeros(axes, dtype))

    def extended(self, key: NamedArray, value: NamedArray, start) -> Cache:
        """With the keys and values of new positions written at slots start, start + 1, ..."""

        def write(slots: NamedArray, new: NamedArray) -> NamedArray:
            order = (BATCH, POSITION, "kv_heads", "head_size")
            array = jax.lax.dynamic_update_slice_in_dim(slots.array, new.rearrange(order).array, start, axis=1)
            return NamedArray(array, slots.axis_names)

        return Cache(write(self.key, key), write(self.value, value))


class Attention(eqx.Module):
    """Causal self-attention; query head n reads key/value head n // (heads / kv_heads)."""

    query: Linear  # [Embed] -> [Heads, HeadSize]
    key: Linear  # [Embed] -> [KvHeads, HeadSize]
    value: Linear  # [Embed] -> [KvHeads, HeadSize]
    out: Linear  # [Heads, HeadSize] -> [Embed]
    query_norm: RmsNorm | None  # [HeadSize]
    key_norm: RmsNorm | None  # [HeadSize]
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, key) -> Attention:
        keys = jax.random.split(key, 4)
        c = config

        def project(Heads, key):
            return linear(c.Embed, (Heads, c.HeadSize), c.init_scale, key, bias=c.attention_bias)

        def norm():
            return RmsNorm.init(c.HeadSize, c.norm_epsilon) if c.qk_norm else None

        return Attention(
            query=project(c.Heads, keys[0]),
            key=project(c.KvHeads, keys[1]),
            value=project(c.KvHeads, keys[2]),
            out=linear((c.Heads, c.HeadSize), c.Embed, c.init_scale / (2 * c.layers) ** 0.5, keys[3]),
            query_norm=norm(),
            key_norm=norm(),
            config=config,
        )

    def project(self, x: NamedArray, positions: NamedArray, execution: Execution):
        """Rotated queries and keys, and values: [Batch, Position, Heads or KvHeads, HeadSize]."""
        c = self.config
        q, k, v = (execution.kernels.project(layer, x) for layer in (self.query, self.key, self.value))
        q = self.query_norm(q, execution) if self.query_norm is not None else q
        k = self.key_norm(k, execution) if self.key_norm is not None else k
        q, k = (rotate(a, positions, c) for a in (q, k))
        return tuple(named(execution.placed(a), name) for a, name in ((q, "query"), (k, "key"), (v, "value")))

    def __call__(self, x: NamedArray, positions: NamedArray, segments: NamedArray | None, execution: Execution):
        """[Batch, Position, Embed] -> the same; a token sees tokens of its own segment at or before its place."""
        q, k, v = self.project(x, positions, execution)
        q, k, v = (a.rearrange(ORDER) for a in (q, k, v))
        ids = None if segments is None else segments.rearrange((BATCH, POSITION)).array
        attended = execution.kernels.attend(q.array, k.array, v.array, ids, self.config.sliding_window)
        attended = execution.placed(NamedArray(attended, q.axis_names))
        return named(execution.kernels.project(self.out, attended), "attention_out")

    def decode(self, x: NamedArray, cache: Cache, start, execution: Execution) -> tuple[NamedArray, Cache]:
        """The same for tokens at positions start, start + 1, ... that follow those in the cache."""
        c = self.config
        Position = x.resolve_axis(POSITION)
        positions = hax.arange(Position) + start
        q, k, v = self.project(x, positions, execution)
        cache = cache.extended(k, v, start)
        slots = jnp.arange(cache.key.resolve_axis("slot").size)
        back = positions.array[:, None] - slots[None, :]
        mask = back >= 0
        if c.sliding_window is not None:
            mask &= back < c.sliding_window
        q = q.rearrange(ORDER)
        attended = execution.kernels.attend_cached(q.array, cache.key.array, cache.value.array, mask[None, None])
        attended = execution.placed(NamedArray(attended, q.axis_names))
        return execution.kernels.project(self.out, attended), cache


def linear(In, Out, scale: float, key, bias: bool = False) -> Linear:
    """A linear layer with normal weights of standard deviation `scale`, [*In, *Out]."""
    layer = Linear.init(In, Out, key=key, use_bias=bias, out_first=False)
    weight = hax.random.normal(key, layer.weight.axes) * scale
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)
