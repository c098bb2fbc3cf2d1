"""The parts of a decoder's layer: grouped-query attention with rotary embeddings, the gated MLP, and RMSNorm."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn import Linear

from gregale.axes.layout import BATCH, POSITION, is_named
from gregale.axes.parameters import position_order
from gregale.model.cache import Cache, DecodeStep
from gregale.model.config import DecoderConfig, LayerKind, RotaryScaling
from gregale.model.execution import Execution, Kind, named
from gregale.model.kernels.operations import PLAIN, Kernels
from gregale.model.losses import LARGEST_LOGITS

CHANNEL = "channel"  # of several axes, one after the other


class RmsNorm(eqx.Module):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset), arXiv 1910.07467; all but the product in float32."""

    weight: NamedArray  # [*Over]
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True, default=0.0)

    @staticmethod
    def init(Over: Axis | tuple[Axis, ...], config: DecoderConfig) -> "RmsNorm":
        """Return a norm with multiplier 1."""
        return RmsNorm(hax.full(Over, 1 - config.norm_offset, jnp.float32), config.norm_epsilon, config.norm_offset)

    def __call__(self, x: NamedArray, execution: Execution, square: NamedArray | None = None) -> NamedArray:
        """Map [..., *Over] to the same in the dtype of `x`; the mean is over all of these axes together.

        - `square`: the mean square of `x`, if it is known, in case of one axis
        """
        over = self.weight.axes
        x = x.rearrange((..., *over))
        weight = self.weight if self.offset == 0 else self.weight + self.offset
        if len(over) == 1:
            known = None if square is None else square.rearrange(x.axes[:-1]).array
            return execution.kernels.rms_norm(x, weight, self.epsilon, known)
        found = execution.kernels.rms_norm(
            x.flatten_axes(over, CHANNEL), weight.flatten_axes(over, CHANNEL), self.epsilon, None
        )
        return found.unflatten_axis(CHANNEL, over)


QUERIES = 256  # whose largest logits are computed at a time, because kernels never hold them in memory
ORDER = (BATCH, POSITION, ..., "head_size")  # of attention's input arrays


class Attention(eqx.Module):
    """Causal self-attention; query head n reads key/value head n // (heads / kv_heads)."""

    query: Linear  # [Embed] -> [Heads, HeadSize]
    key: Linear  # [Embed] -> [KvHeads, HeadSize]
    value: Linear  # [Embed] -> [KvHeads, HeadSize]
    out: Linear  # [Heads, HeadSize] -> [Embed]
    query_norm: RmsNorm | None  # [HeadSize] or [Heads, HeadSize]
    key_norm: RmsNorm | None  # [HeadSize] or [KvHeads, HeadSize]
    sinks: NamedArray | None  # [Heads]
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, key) -> "Attention":
        keys = jax.random.split(key, 4)
        c = config

        def project(Heads, key):
            return linear(c.Embed, (Heads, c.HeadSize), c.init_scale, key, bias=c.attention_bias)

        small = c.init_scale / (2 * c.layers) ** 0.5

        def norm(Heads):
            over = c.normalised_together(Heads)
            return None if over is None else RmsNorm.init(over, c)

        return Attention(
            query=project(c.Heads, keys[0]),
            key=project(c.KvHeads, keys[1]),
            value=project(c.KvHeads, keys[2]),
            out=linear((c.Heads, c.HeadSize), c.Embed, small, keys[3], bias=c.biased),
            query_norm=norm(c.Heads),
            key_norm=norm(c.KvHeads),
            sinks=hax.zeros(c.Heads) if c.sinks else None,
            config=config,
        )

    def project(self, x: NamedArray, positions: NamedArray, kind: Kind, execution: Execution):
        """Return rotated queries and keys, and values: [Batch, Position, Heads or KvHeads, HeadSize].

        Attention divides scores by the root of a head's size; queries are scaled so that the divisor is the root of
        `score_width`, and by the factor of the rotary scaling.
        """
        c = self.config
        q, k, v = (execution.project(layer, x) for layer in (self.query, self.key, self.value))
        q = self.query_norm(q, execution) if self.query_norm is not None else q
        k = self.key_norm(k, execution) if self.key_norm is not None else k
        q, k = (rotate(a, positions, c, execution.kernels, kind) for a in (q, k))
        factors = [each.score_factor for each in c.kinds]
        if c.score_width is not None:
            factors = [factor * (c.HeadSize.size / c.score_width) ** 0.5 for factor in factors]
        if any(factor != 1 for factor in factors):
            own = jnp.asarray(factors)[kind.array] if isinstance(kind, NamedArray) else factors[kind]
            q = (q * own).astype(q.dtype)
        return tuple(named(execution.placed(a), name) for a, name in ((q, "query"), (k, "key"), (v, "value")))

    def __call__(
        self, x: NamedArray, positions: NamedArray, segments: NamedArray | None, kind: Kind, execution: Execution
    ) -> tuple[NamedArray, dict[str, NamedArray]]:
        """Map [Batch, Position, Embed] to the same; a token sees tokens of its own segment at or before its index.

        It also returns `largest_logits` by their name if the execution `measures_logits`, as constants.
        """
        q, k, v = self.project(x, positions, kind, execution)
        attended, largest = self.attended(q, k, v, segments, kind, execution, execution.measures_logits)
        out = execution.summed(attended, "attention_out")
        if not execution.measures_logits:
            return out, {}
        if largest is None:
            q, k = jax.lax.stop_gradient((q, k))
            return out, {LARGEST_LOGITS: self._largest(q, k, segments, kind, execution)}
        of_heads = jnp.max(jax.lax.stop_gradient(largest), axis=1)  # [batch, heads]
        KvHeads = self.config.KvHeads
        of_groups = jnp.max(of_heads.reshape(of_heads.shape[0], KvHeads.size, -1), axis=-1)
        return out, {LARGEST_LOGITS: NamedArray(of_groups, (BATCH, KvHeads.name))}

    def largest_logits(
        self, x: NamedArray, positions: NamedArray, segments: NamedArray | None, kind: Kind, execution: Execution
    ) -> NamedArray:
        """Return the largest logits of the same call, before the cap: float32 [Batch, KvHeads]."""
        q, k, _ = self.project(x, positions, kind, execution)
        return self._largest(q, k, segments, kind, execution)

    def _largest(self, q, k, segments: NamedArray | None, kind: Kind, execution: Execution) -> NamedArray:
        q, k = q.rearrange(ORDER), k.rearrange(ORDER)
        ids = None if segments is None else segments.rearrange((BATCH, POSITION)).array

        order = position_order(q.resolve_axis(POSITION).size, execution.layout.context)

        def largest(of: LayerKind, q, k, ids) -> jax.Array:
            return largest_logits(q, k, ids, of.window, order)

        return NamedArray(by_kind(self.config, kind, largest, q.array, k.array, ids), (BATCH, self.config.KvHeads.name))

    def prefill(
        self, x: NamedArray, positions: NamedArray, segments: NamedArray, slots: int, kind: Kind, execution: Execution
    ) -> tuple[NamedArray, Cache]:
        """Return attention's output for prompts, and the cache for `decode`."""
        q, k, v = self.project(x, positions, kind, execution)
        return self.attended(q, k, v, segments, kind, execution)[0], Cache.of_prompt(k, v, slots, execution)

    def decode(
        self, x: NamedArray, cache: Cache, turn: DecodeStep, kind: Kind, execution: Execution
    ) -> tuple[NamedArray, Cache]:
        """Return attention's output for one token of each row after the cached ones: [Batch, Position 1, Embed]."""
        q, k, v = self.project(x, turn.positions, kind, execution)
        attended, cache = cache.attend(q, k, v, turn, execution, self.config.score_softcap, self.sinks)
        return execution.project(self.out, attended), cache

    def with_logits_below(self, limit: float, largest: NamedArray) -> "Attention":
        """Return it with the query and key weights of each group of heads times sqrt(limit / S), where S > limit.

        So its largest logit S becomes the limit (QK-clip, Kimi K2, arXiv 2507.20534).

        - `largest`: S, [layers, KvHeads]; the weights may have the axis of layers too
        """
        KvHeads, Heads = self.config.KvHeads, self.config.Heads
        largest = largest.rearrange((..., KvHeads))
        by, names = jnp.sqrt(limit / jnp.maximum(largest.array, limit)), largest.axis_names
        of_keys = NamedArray(by, names)
        of_queries = NamedArray(jnp.repeat(by, Heads.size // KvHeads.size, axis=-1), (*names[:-1], Heads.name))

        def scaled(layer: Linear, by: NamedArray) -> Linear:
            return jax.tree.map(lambda leaf: (leaf * by).rearrange(leaf.axes), layer, is_leaf=is_named)

        return replace(self, query=scaled(self.query, of_queries), key=scaled(self.key, of_keys))

    def attended(
        self, q, k, v, segments: NamedArray | None, kind: Kind, execution: Execution, measures: bool = False
    ) -> tuple[NamedArray, jax.Array | None]:
        """Return causal attention of a whole sequence after its output projection: [Batch, Position, Embed].

        - `measures`: the largest scores of queries too, as of `AttendWithLargest`, if attention's form has them
        """
        q, k, v = (a.rearrange(ORDER) for a in (q, k, v))
        ids = None if segments is None else segments.rearrange((BATCH, POSITION)).array

        sinks = self.sinks
        if sinks is not None:  # of each query, so that the sum of its gradient over tokens is that of a bias
            sinks = jnp.broadcast_to(sinks.array.astype(jnp.float32)[:, None], (*q.array.shape[:3], 1))

        def attend(of: LayerKind, q, k, v, ids, sinks) -> tuple[jax.Array, jax.Array | None]:
            given = q, k, v, ids, of.window, self.config.score_softcap, sinks
            return execution.attend_with_largest(*given) if measures else (execution.attend(*given), None)

        attended, largest = by_kind(self.config, kind, attend, q.array, k.array, v.array, ids, sinks)
        return execution.project(self.out, execution.placed(NamedArray(attended, q.axis_names))), largest


def linear(In, Out, scale: float, key, bias: bool = False) -> Linear:
    """Return a linear layer with normal weights of standard deviation `scale`, [*In, *Out]."""
    layer = Linear.init(In, Out, key=key, use_bias=bias, out_first=False)
    weight = hax.random.normal(key, layer.weight.axes) * scale
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)


def frequencies(half_size: int, base: float, scaling: RotaryScaling | None) -> np.ndarray:
    """Return the radians per position of each channel pair: `base ** (-i / half_size)`, float32 [half].

    With `scaling`, the part of a frequency that is not kept is divided by `factor`.
    """
    frequency = base ** (-np.arange(half_size, dtype=np.float64) / half_size)
    if scaling is not None:
        kept = scaling.kept(frequency)
        frequency = kept * frequency + (1 - kept) * frequency / scaling.factor
    return frequency.astype(np.float32)


def rotate(
    x: NamedArray, positions: NamedArray, config: DecoderConfig, kernels: Kernels = PLAIN, kind: Kind = 0
) -> NamedArray:
    """Turn channel pairs (i, i + half) of `x` by position * frequency_i; computed in float32.

    - `x`: [..., position, ..., head_size]
    - `positions`: integer positions, on axes that `x` has
    - `kind`: the layer's kind, which has the base and the scaling
    """
    HeadSize = config.HeadSize
    of_kinds = [frequencies(HeadSize.size // 2, each.rotary_base, each.rotary_scaling) for each in config.kinds]
    frequency = jnp.stack(of_kinds)[kind.array] if isinstance(kind, NamedArray) else jnp.asarray(of_kinds[kind])
    others = x.rearrange((..., HeadSize)).axes[:-1]
    # Add axes of size 1 for axes of x that `positions` lacks: broadcast by name would store the sines for each head.
    shared = [axis for axis in others if axis in positions.axes]
    sizes = [axis.size if axis in shared else 1 for axis in others]
    angle = positions.rearrange(shared).array.reshape(*sizes, 1).astype(jnp.float32) * frequency
    turned = kernels.rotate(x.rearrange((..., HeadSize)).array, angle)
    return hax.named(turned, (*others, HeadSize)).rearrange(x.axes)


def largest_logits(
    q: jax.Array, k: jax.Array, segments: jax.Array | None, window: int | None, order: np.ndarray
) -> jax.Array:
    """Return the largest q . k / sqrt(head size) of the pairs of tokens that attend: float32 [batch, kv_heads].

    Arguments: as for `Attend`, and `order`, the position of each index (`axes.position_order`). Nothing is sent between
    devices that split the batch or the heads.
    """
    length, kv_heads, width = k.shape[1:]
    block = min(QUERIES, length)
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, width)
    places = jnp.asarray(order)

    def of_block(largest: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        queries = jax.lax.dynamic_slice_in_dim(grouped, start, block, axis=1)
        logits = jnp.einsum("bqkgd,bskd->bkgqs", queries, k, preferred_element_type=jnp.float32) / width**0.5
        distance = jax.lax.dynamic_slice_in_dim(places, start, block)[:, None] - places
        attends = (distance >= 0) & (True if window is None else distance < window)
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, block, axis=1)
            attends = (own[:, :, None] == segments[:, None, :])[:, None, None] & attends
        return jnp.maximum(largest, jnp.max(jnp.where(attends, logits, -jnp.inf), axis=(2, 3, 4))), None

    none = jnp.full((k.shape[0], kv_heads), -jnp.inf, jnp.float32)
    # The last block begins early enough to be whole: it repeats queries, which does not change the largest.
    starts = jnp.minimum(jnp.arange(0, length, block), length - block)
    return jax.lax.scan(of_block, none, starts)[0]


def by_kind(config: DecoderConfig, kind: Kind, function: Callable[..., Any], *arguments) -> Any:
    """Return `function(the layer's kind, *arguments)`, which must have the same shapes for all kinds.

    If the kind is an array, under the `vmap` over a pipeline's stages, all kinds are computed and one is selected.
    """
    if isinstance(kind, NamedArray):
        return jax.lax.switch(kind.array, [partial(function, each) for each in config.kinds], *arguments)
    return function(config.kinds[kind], *arguments)


class Mlp(eqx.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202): down(activation(gate(x)) * up(x))."""

    gate: Linear  # [Embed] -> [Mlp]
    up: Linear  # [Embed] -> [Mlp]
    down: Linear  # [Mlp] -> [Embed]
    activation: str = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, key, Width: Axis) -> "Mlp":
        keys = jax.random.split(key, 3)
        c = config
        return Mlp(
            gate=linear(c.Embed, Width, c.init_scale, keys[0]),
            up=linear(c.Embed, Width, c.init_scale, keys[1]),
            down=linear(Width, c.Embed, c.init_scale / (2 * c.layers) ** 0.5, keys[2]),
            activation=c.activation,
        )

    def __call__(self, x: NamedArray, execution: Execution) -> NamedArray:
        fed = execution.mlp(x, (self.gate, self.up, self.down), self.activation)
        if fed is not None:
            return execution.summed(fed, "mlp_out")
        gate = named(execution.placed(execution.project(self.gate, x)), "gate")
        up = named(execution.placed(execution.project(self.up, x)), "up")
        gated = {"silu": execution.kernels.swiglu, "gelu": execution.kernels.geglu}[self.activation]
        product = gated(gate, up)  # activation(gate) * up
        return execution.summed(execution.project(self.down, product), "mlp_out")

    def with_sums(self, x: NamedArray, mask: NamedArray | None, execution: Execution) -> tuple[NamedArray, dict]:
        """Return the output, and no sums for the loss, see `Experts`."""
        del mask
        return self(x, execution), {}
