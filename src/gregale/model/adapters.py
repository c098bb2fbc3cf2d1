"""Adapters of a model (LoRA, arXiv 2106.09685), and the marks of its other weights."""

from dataclasses import replace
from typing import Any, TypeGuard

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from haliax.nn import Linear

from gregale.axes.layout import BATCH, EMBED, LORA_RANK, POSITION, is_layers, is_named
from gregale.axes.parameters import Frozen, QuantisedWeight, is_buffer, is_parameter, is_quantised
from gregale.codecs.codec import NormalFloatCodec, UniformCodec
from gregale.errors import UserError
from gregale.model.config import EXPERT_TARGETS, TARGETS, AdapterConfig

FACTORS = {"lora_a", "lora_b"}
Axes = tuple[Axis, ...]
CODECS = {"int8": UniformCodec(bits=8), "nf4": NormalFloatCodec()}


class Factors(eqx.Module):
    """The adapters of a matrix of each expert: y = x W + scale * (x A) B, computed by `kernels.grouped_mlp`."""

    lora_a: NamedArray  # A: [Experts, In, LoraRank]
    lora_b: NamedArray  # B: [Experts, LoraRank, Out]
    scale: float = eqx.field(static=True)


class ExpertMatrices(eqx.Module):
    """The base of a layer whose `gate`, `up` and `down` are matrices of experts; `adapters` has some of these names."""

    adapters: dict[str, Factors] = eqx.field(default_factory=dict, kw_only=True)

    def with_adapters(self, config: AdapterConfig, key: jax.Array) -> "ExpertMatrices":
        """Return the layer, or a stack of them, whose matrices among `config.expert_targets` have adapters."""
        names = config.expert_targets

        def factors(name: str, key: jax.Array) -> Factors:
            weight, Rank = getattr(self, name), Axis(LORA_RANK, config.rank)
            In, Out = (weight.resolve_axis(axis) for axis in (("mlp", EMBED) if name == "down" else (EMBED, "mlp")))
            stacked = tuple(axis for axis in weight.axes if axis not in (In, Out))
            return Factors(*drawn(stacked, (In,), Rank, (Out,), key), config.scale)

        found = zip(names, jax.random.split(key, len(names)), strict=True)
        return replace(self, adapters={name: factors(name, own) for name, own in found})


class Lora(Linear):
    """A linear layer of a model that computes, with an adapter: y = x W + bias + scale * (x A) B.

    `gregale.model.execution.Execution.project` computes it: A B, which has the size of W, is never made.

    - `dropout`: share of the values of x that are zero for A in training; the others are divided by the rest
    """

    lora_a: Linear = eqx.field(kw_only=True)  # A: [*In] -> [LoraRank]
    lora_b: Linear = eqx.field(kw_only=True)  # B: [LoraRank] -> [*Out]
    scale: float = eqx.field(static=True, kw_only=True)
    dropout: float = eqx.field(static=True, kw_only=True)

    @property
    def base(self) -> Linear:
        """Return the layer without its adapter."""
        return Linear(self.weight, self.bias, self.In, self.Out)

    def dropped(self, x: NamedArray, keys: NamedArray, order: np.ndarray) -> NamedArray:
        """Return x for A in training, zero with the probability `dropout`.

        Bits of A, which differ by layer and step, are part of each key: of bfloat16, which another mesh seldom rounds
        differently.

        - `keys`: of the rows, [batch]
        - `order`: the position of each index, see `axes.position_order`
        """
        row = jax.lax.stop_gradient(self.lora_a.weight.array).reshape(-1, self.lora_a.weight.array.shape[-1])[0]
        own = hashed(jax.lax.bitcast_convert_type(row.astype(jnp.bfloat16), jnp.uint16))
        x = x.rearrange((BATCH, POSITION, ...))

        def of_token(key: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, position), 1 - self.dropout, x.array.shape[2:])

        of_rows = jax.vmap(lambda key: jax.random.fold_in(key, own))(keys.array)
        kept = jax.vmap(jax.vmap(of_token, (None, 0)), (0, None))(of_rows, jnp.asarray(order))
        return NamedArray(jnp.where(kept, x.array / (1 - self.dropout), 0).astype(x.dtype), x.axis_names)

    def __call__(self, inputs: Any, *, key: Any = None) -> Any:
        raise TypeError("a layer with an adapter is computed by `Execution.project(layer, x)`")


def is_lora(node: Any) -> TypeGuard[Lora]:
    return isinstance(node, Lora)


def adapted(model: Any, config: AdapterConfig, key: jax.Array) -> Any:
    """Return a model whose `config.targets` have adapters, and whose other weights are marked as frozen.

    A is uniform in +-1 / sqrt(inputs), and B is zero, so that outputs are those of the model. Buffers stay.

    Raises `UserError` if the model lacks a target.
    """
    check_targets(model, config)
    found = [path for path, node in _linears(model) if path[-1] in config.targets]
    keys = dict(zip(found, jax.random.split(key, len(found)), strict=True))
    if config.expert_targets:
        nodes, structure = jax.tree.flatten(model, is_leaf=_has_experts)
        own = jax.random.split(jax.random.fold_in(key, len(nodes) + 1), len(nodes))
        adapted_nodes = [
            node.with_adapters(config, one) if _has_experts(node) else node
            for node, one in zip(nodes, own, strict=True)
        ]
        model = structure.unflatten(adapted_nodes)

    def marked(leaf):
        return Frozen(leaf) if is_quantised(leaf) or is_parameter(leaf.array if is_named(leaf) else leaf) else leaf

    def one(path, node):
        if not isinstance(node, Linear):
            return node if FACTORS & set(_words(path)) else marked(node)
        frozen = jax.tree.map(marked, node, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf))
        return with_adapter(node, frozen, config, keys[words]) if (words := _words(path)) in keys else frozen

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=_is_whole)


def quantised(model: Any, base: str) -> Any:
    """Return a model with the weights of its layers' `TARGETS` in blocks of a codec of `CODECS`; `dtype`: as it was.

    Blocks lie along the last axis of a projection's inputs. A weight stays as it was if the block does not divide it.
    """
    codec = CODECS.get(base)

    def one(path, node):
        if codec is None or not isinstance(node, Linear) or _words(path)[-1] not in TARGETS:
            return node
        along, first = axis_spec_to_tuple(node.In)[-1], node.weight.axes[0]
        if along.size % codec.block or not is_layers(first.name):
            return node
        return replace(node, weight=QuantisedWeight.of(node.weight, codec, along.name))

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=_is_whole)


def with_adapter(layer: Linear, frozen: Linear, config: AdapterConfig, key: jax.Array) -> Lora:
    """Return a linear layer, or a stack of them, with an adapter; `frozen`: the layer with its marks."""
    In, Out, Rank = axis_spec_to_tuple(layer.In), axis_spec_to_tuple(layer.Out), Axis(LORA_RANK, config.rank)
    stacked = tuple(axis for axis in layer.weight.axes if axis not in (*In, *Out))
    a, b = drawn(stacked, In, Rank, Out, key)
    return Lora(
        frozen.weight,
        frozen.bias,
        layer.In,
        layer.Out,
        lora_a=Linear(a, None, layer.In, Rank),
        lora_b=Linear(b, None, Rank, layer.Out),
        scale=config.scale,
        dropout=config.dropout,
    )


def drawn(stacked: Axes, In: Axes, Rank: Axis, Out: Axes, key: jax.Array) -> tuple[NamedArray, NamedArray]:
    """Return A, uniform in +-1 / sqrt(inputs), and B, which is zero."""
    bound = float(np.prod([axis.size for axis in In])) ** -0.5
    a = hax.random.uniform(key, (*stacked, *In, Rank), minval=-bound, maxval=bound)
    return a, hax.zeros((*stacked, Rank, *Out))


def factor_paths(path: str) -> tuple[str, str]:
    """Return the paths that the factors A and B of a weight have, if it has an adapter."""
    layer, _, name = path.rpartition(".")
    if name == "weight":
        return f"{layer}.lora_a.weight", f"{layer}.lora_b.weight"
    return f"{layer}.adapters.{name}.lora_a", f"{layer}.adapters.{name}.lora_b"


def hashed(values: jax.Array, places: np.ndarray | None = None) -> jax.Array:
    """Return a number that depends on all integers of an array and on their places (default: its order): uint32."""
    places = np.arange(values.size) if places is None else places
    factors = jnp.asarray(2 * places + 1, jnp.uint32)
    return jnp.sum(values.astype(jnp.uint32) * factors * jnp.uint32(2654435761), dtype=jnp.uint32)


def without_adapters(model: Any) -> Any:
    """Return a model that computes, with its frozen weights alone; a model without adapters is as it was."""
    found = jax.tree.map(lambda node: node.base if is_lora(node) else node, model, is_leaf=is_lora)
    return jax.tree.map(
        lambda node: replace(node, adapters={}) if _has_experts(node) else node, found, is_leaf=_has_experts
    )


def factors_or_all(weights: Any) -> Any:
    """Return the factors of adapters among weights that compute, and None for others; all weights without adapters."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(weights)[0]]
    if not any(FACTORS & set(_words(path)) for path in paths):
        return weights

    def one(path, leaf):
        return leaf if FACTORS & set(_words(path)) else None

    return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_named)


def merged_weight(weight: NamedArray, a: NamedArray, b: NamedArray, scale: float) -> NamedArray:
    """Return W + scale * A B in float32, [*axes of W]."""
    update = hax.dot(a.astype(jnp.float32), b.astype(jnp.float32), axis=LORA_RANK)
    return weight.astype(jnp.float32) + scale * update.rearrange(weight.axes)


def check_targets(model: Any, config: AdapterConfig) -> None:
    """Raise `UserError` if the model lacks a target."""
    there = {path[-1] for path, _ in _linears(model)}
    if any(map(_has_experts, jax.tree.leaves(model, is_leaf=_has_experts))):
        there |= {*EXPERT_TARGETS}
    if lacking := [name for name in config.targets if name not in there]:
        raise UserError(
            f"adapter.targets names {lacking[0]!r}, and the model has no such projection. Targets of this model: "
            f"{', '.join(sorted(there)) or 'none'}."
        )


def _linears(model: Any) -> list[tuple[tuple[str, ...], Linear]]:
    found = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_whole)[0]
    return [(_words(path), node) for path, node in found if isinstance(node, Linear)]


def _words(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _has_experts(node: Any) -> bool:
    return isinstance(node, ExpertMatrices)


def _is_whole(node: Any) -> bool:
    return isinstance(node, Linear) or is_named(node) or is_buffer(node)
