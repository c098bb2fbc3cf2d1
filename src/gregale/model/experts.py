"""A mixture of experts in place of a layer's MLP: each token passes through some of many small MLPs.

    y = sum over the experts e of a token of: weight_e * down_e(activation(gate_e(x)) * up_e(x)),  plus a shared MLP

No token is dropped: a device sorts its (token, expert) pairs by expert, and multiplies each expert's rows by its
matrices (`gregale.model.kernels.grouped`). All experts' weights are gathered for that, like those of other layers; or,
if `compute` splits `experts`, tokens are sent to the devices of their experts (`gregale.model.exchange`). The code of a
device is in `jax.shard_map`, forward and backward, so that what is summed over which mesh axis is written down: outputs
over that of `mlp`, gradients of weights over those of tokens, nothing over `replica`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gregale.axes.gather import scattered
from gregale.axes.layout import EMBED, EXPERTS, ROUTER, SHARED_GATE, Layout, unmapped_if_one
from gregale.axes.parameters import Buffer
from gregale.model.adapter_config import MLP_TARGETS
from gregale.model.adapters import ExpertMatrices
from gregale.model.config import DecoderConfig
from gregale.model.exchange import Exchange, inverse
from gregale.model.execution import Execution
from gregale.model.kernels.grouped_int8 import Integers, integers_of
from gregale.model.kernels.grouped_mlp import GroupedMlp
from gregale.model.kernels.quantised import EightBits
from gregale.model.kernels.reference import GATED
from gregale.model.mlp import Mlp
from gregale.model.routing import TOKENS, Choice, choose, router_logits, routing_sums

MLP = "mlp"
SharedGate = Axis(SHARED_GATE, 1)
# Of weights in products. If `embed`, which the gather joins, were the last axis, XLA:TPU would copy what it gathers.
MATRICES = (EXPERTS, EMBED, MLP)


class Experts(ExpertMatrices):
    """A router, its experts, and an MLP for all tokens beside them."""

    router: NamedArray  # [Embed, Router]
    gate: NamedArray  # [Experts, Embed, Mlp]
    up: NamedArray  # [Experts, Embed, Mlp]
    down: NamedArray  # [Experts, Mlp, Embed]
    router_bias: NamedArray | None  # [Router]
    gate_bias: NamedArray | None  # [Experts, Mlp]
    up_bias: NamedArray | None  # [Experts, Mlp]
    down_bias: NamedArray | None  # [Experts, Embed]
    shared: Mlp | None
    shared_gate: NamedArray | None  # [Embed, SharedGate]
    bias: Buffer | None  # [Router], float32: added to the scores for the choice
    load: Buffer  # [Router], float32: tokens of each expert in the last step, over their mean
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, key) -> "Experts":
        c, keys = config, jax.random.split(key, 6)
        assert c.experts is not None
        E, Router, Width = c.experts.Experts, c.experts.Router, c.experts.Mlp
        small = c.init_scale / (2 * c.layers) ** 0.5

        def drawn(key, axes: tuple[Axis, ...], scale: float) -> NamedArray:
            return hax.random.normal(key, axes) * scale

        def bias(*axes: Axis) -> NamedArray | None:
            return hax.zeros(axes) if c.biased else None

        return Experts(
            router=drawn(keys[0], (c.Embed, Router), c.init_scale),
            gate=drawn(keys[1], (E, c.Embed, Width), c.init_scale),
            up=drawn(keys[2], (E, c.Embed, Width), c.init_scale),
            down=drawn(keys[3], (E, Width, c.Embed), small),
            router_bias=bias(Router),
            gate_bias=bias(E, Width),
            up_bias=bias(E, Width),
            down_bias=bias(E, c.Embed),
            shared=Mlp.init(c, keys[4], Axis(MLP, c.experts.shared)) if c.experts.shared else None,
            shared_gate=drawn(keys[5], (c.Embed, SharedGate), c.init_scale) if c.experts.shared_gate else None,
            bias=Buffer(hax.zeros(Router)) if c.experts.balance.bias else None,
            load=Buffer(hax.ones(Router)),
            config=c,
        )

    def __call__(
        self, x: NamedArray, mask: NamedArray | None, execution: Execution
    ) -> tuple[NamedArray, dict[str, NamedArray]]:
        """Return the output [batch, position, embed], and `routing_sums` if there is a mask [batch, position]."""
        settings = self.config.experts
        assert settings is not None
        bias = None if self.bias is None else self.bias.value
        logits = router_logits(x, self.router, settings.router, execution)
        if self.router_bias is not None:
            logits = logits + self.router_bias.astype(jnp.float32)
        choice, scores = choose(logits, bias, settings, execution)
        fed = self._chosen(x, choice, execution)
        if self.shared is not None:
            fed = fed + self._shared(self.shared, x, execution)
        sums = {} if mask is None else routing_sums(choice, logits, scores, mask, settings)
        return execution.summed(fed, "mlp_out"), sums

    def after(self, load: NamedArray) -> "Experts":
        """Return the experts, or a stack of them, after a step with these tokens of each, [..., router]."""
        settings = self.config.experts
        assert settings is not None
        share = load / hax.maximum(hax.mean(load, ROUTER), 1e-20)
        bias, rate = self.bias, settings.balance.bias_rate
        if bias is not None and rate > 0:
            bias = Buffer(next_bias(bias.value, load, rate))
        return replace(self, load=Buffer(share), bias=bias)

    def _chosen(self, x: NamedArray, choice: Choice, execution: Execution) -> NamedArray:
        x = x.rearrange((*TOKENS, EMBED))
        matrices, integers, grouped = (self.gate, self.up, self.down), (), execution.kernels.grouped
        if execution.matmul == "int8":
            integers = tuple(integers_of(execution.quantisation(), each, MATRICES) for each in matrices)
            grouped = execution.kernels.grouped_int8
        exact = [each.exact if isinstance(each, EightBits) else each for each in matrices]
        weights = [each.rearrange(MATRICES) for each in exact]
        weights += [each for each in (self.gate_bias, self.up_bias, self.down_bias) if each is not None]
        adapted = tuple(number for number, name in enumerate(MLP_TARGETS) if name in self.adapters)
        factors = [self.adapters[MLP_TARGETS[number]] for number in adapted]
        weights += [each for pair in factors for each in (pair.lora_a, pair.lora_b)]
        axes = tuple(weight.axes for weight in weights)
        devices = execution.layout.devices((MLP,), execution.layout.compute)
        scale = factors[0].scale if factors else 1.0
        mlp = GroupedMlp(grouped, GATED[self.config.activation], devices, adapted, scale)
        mixture = Mixture(x.axes, axes, mlp, execution.layout)
        found: Any = _mixed(mixture, x.array, *choice, integers, *(weight.array for weight in weights))
        return NamedArray(found, x.axis_names)

    def _shared(self, shared: Mlp, x: NamedArray, execution: Execution) -> NamedArray:
        found = shared(x, execution)
        if self.shared_gate is None:
            return found
        weight = hax.nn.sigmoid(router_logits(x, self.shared_gate, "dtype", execution)[SharedGate.name, 0])
        return found * weight.astype(found.dtype)


def next_bias(bias: NamedArray, load: NamedArray, rate: float) -> NamedArray:
    """Return the biases after a step: `bias + rate * sign(mean load - load)`, less their mean (arXiv 2408.15664).

    - `load`: tokens of each expert in the step, [..., router]
    """
    moved = bias + rate * hax.sign(hax.mean(load, ROUTER) - load)
    return moved - hax.mean(moved, ROUTER)


class Order(NamedTuple):
    """The (token, expert) pairs of a device, sorted by expert: [pairs] each, and [experts]."""

    pairs: jax.Array  # the pair at each place
    places: jax.Array  # the place of each pair
    sizes: jax.Array  # the pairs of each expert


class Saved(NamedTuple):
    """The values that the backward pass takes, of a device."""

    order: Order
    gate: jax.Array  # [pairs, mlp], in order
    up: jax.Array


@dataclass(frozen=True)
class Mixture:
    """The shapes and shardings of one call."""

    tokens: tuple[Axis, ...]  # batch, position, embed
    weights: tuple[tuple[Axis, ...], ...]  # of each weight of `GroupedMlp`
    mlp: GroupedMlp
    layout: Layout

    @property
    def row_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes(self.tokens[:2], self.layout.compute)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which tokens are exchanged; empty if all experts are gathered."""
        return self.layout.mesh_axes((EXPERTS,), self.layout.compute)

    @property
    def exchange(self) -> Exchange:
        axes, devices = self.expert_axes, self.layout.devices((EXPERTS,), self.layout.compute)
        return Exchange(self.weights[0][0].size, axes, devices, self.row_axes, self.mlp)

    def scattered(self, gradients: Iterable[jax.Array]) -> list[jax.Array]:
        """Return the sums of gradients by weights over tokens, as shards of `params`."""
        over = [name for name in self.row_axes if name not in self.expert_axes]

        def one(gradient: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
            # Down's bias lacks `mlp` too, but devices have the same gradient of it.
            is_addend = self.mlp.adapted and MLP not in [axis.name for axis in axes]
            return scattered(gradient, axes, [*over, *(self.mlp_axes if is_addend else ())], self.layout)

        return list(map(one, gradients, self.mlp.trained(self.weights)))

    def with_frozen(self, gradients: Sequence[jax.Array]) -> list[jax.Array | None]:
        """Return the gradients by all weights: None for frozen ones."""
        return [*[None] * (len(self.weights) - len(gradients)), *gradients]

    @property
    def mlp_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes((MLP,), self.layout.compute)

    def sharded(self, function, inputs, outputs):
        return self.layout.shard_map(unmapped_if_one(function), inputs, outputs)

    def weight_specs(self, mapping) -> tuple[PartitionSpec, ...]:
        return tuple(self.layout.spec(axes, mapping) for axes in self.weights)

    @property
    def gradient_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(self.mlp.trained(self.weight_specs(self.layout.params)))

    @property
    def token_spec(self) -> PartitionSpec:
        return self.layout.spec(self.tokens, self.layout.compute)

    @property
    def saved_specs(self) -> Saved:
        pairs: Any = PartitionSpec(self.row_axes)
        hidden: Any = PartitionSpec(self.row_axes, self.mlp_axes or None)
        return Saved(Order(pairs, pairs, pairs), hidden, hidden)

    def order(self, experts: jax.Array) -> Order:
        flat, count = experts.reshape(-1), self.weights[0][0].size
        pairs = jnp.argsort(flat, stable=True).astype(jnp.int32)
        return Order(pairs, inverse(pairs), (flat[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32))


def _summed(order: Order, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the sum of each token's pairs, float32: [pairs, n] in order -> [*tokens, n]."""
    # XLA:TPU counts four times the cycles of these sums of two for one sum over an axis, and writes more bundles.
    first, *others = (part.astype(jnp.float32) for part in rows[order.places.reshape(prod(shape), -1).T])
    return reduce(jnp.add, others, first).reshape(*shape, -1)


def _of_tokens(order: Order, active: int, x: jax.Array) -> jax.Array:
    """Return a row of tokens for each pair, in order: [*tokens, n] -> [pairs, n]."""
    return x.reshape(-1, x.shape[-1])[order.pairs // active]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(mixture: Mixture, x, experts, weights, integers: tuple[Integers, ...], *matrices) -> jax.Array:
    """Return the sum over each token's experts, [batch, position, embed].

    - `experts`, `weights`: [batch, position, active], see `Choice`
    - `integers`: those of the first matrices, which products take in their place; they get all of the gradient
    - `matrices`: the weights of `GroupedMlp`
    """
    return _mixed_forward(mixture, x, experts, weights, integers, *matrices)[0]


def _mixed_forward(mixture: Mixture, x, experts, weights, integers, *matrices):
    matrices = (*integers, *matrices[len(integers) :])
    if mixture.expert_axes:
        return _exchanged(mixture, x, experts, weights, *matrices), (x, experts, weights, *matrices)
    mlp, over = mixture.mlp, mixture.mlp_axes

    def local(x, experts, weights, *matrices):
        order = mixture.order(experts)
        rows = _of_tokens(order, experts.shape[-1], x)
        saved = Saved(order, *mlp.inner(rows, order.sizes, matrices))
        factors = weights.reshape(-1)[order.pairs][:, None].astype(x.dtype)
        out = mlp.outer(saved[1:], factors, order.sizes, matrices)
        out = _summed(order, out, x.shape[:2]).astype(x.dtype)
        return (jax.lax.psum(out, over) if over else out), saved

    tokens, saved = mixture.token_spec, mixture.saved_specs
    inputs = (tokens, tokens, tokens, *mixture.weight_specs(mixture.layout.compute))
    out, kept = mixture.sharded(local, inputs, (tokens, saved))(x, experts, weights, *matrices)
    kept = kept._replace(gate=checkpoint_name(kept.gate, "gate"), up=checkpoint_name(kept.up, "up"))
    return out, (kept, x, weights, *matrices)


def _mixed_backward(mixture: Mixture, saved, cotangent):
    if mixture.expert_axes:
        return _exchanged_backward(mixture, saved, cotangent)
    layout, over = mixture.layout, mixture.mlp_axes

    def local(cotangent, saved: Saved, x, weights, *matrices):
        order, active = saved.order, weights.shape[-1]
        rows, by_rows = (_of_tokens(order, active, each) for each in (x, cotangent))
        factors = weights.reshape(-1)[order.pairs][:, None].astype(x.dtype)
        by_x, by_weights, gradients = mixture.mlp.backward(rows, by_rows, saved[1:], factors, order.sizes, matrices)
        by_x = _summed(order, by_x, x.shape[:2]).astype(x.dtype)
        by_weights = by_weights[order.places].reshape(weights.shape)
        by_x, by_weights = jax.lax.psum((by_x, by_weights), over) if over else (by_x, by_weights)
        return by_x, by_weights.astype(weights.dtype), *mixture.scattered(gradients)

    tokens, compute = mixture.token_spec, mixture.weight_specs(layout.compute)
    inputs = (tokens, mixture.saved_specs, tokens, tokens, *compute)
    outputs = (tokens, tokens, *mixture.gradient_specs)
    by_x, by_weights, *parts = mixture.sharded(local, inputs, outputs)(cotangent, *saved)
    return by_x, None, by_weights, None, *mixture.with_frozen(parts)


def _exchanged(mixture: Mixture, x, experts, weights, *matrices) -> jax.Array:
    over, tokens = mixture.mlp_axes, mixture.token_spec

    def local(x, *more):
        out = mixture.exchange.forward(x, *more).astype(x.dtype)
        return jax.lax.psum(out, over) if over else out

    inputs = (tokens, tokens, tokens, *mixture.weight_specs(mixture.layout.compute))
    return mixture.sharded(local, inputs, tokens)(x, experts, weights, *matrices)


def _exchanged_backward(mixture: Mixture, saved, cotangent):
    over, tokens = mixture.mlp_axes, mixture.token_spec

    def local(cotangent, x, experts, weights, *matrices):
        by_x, by_weights, gradients = mixture.exchange.backward(cotangent, x, experts, weights, *matrices)
        by_x = by_x.astype(x.dtype)
        by_x, by_weights = jax.lax.psum((by_x, by_weights), over) if over else (by_x, by_weights)
        return by_x, by_weights.astype(weights.dtype), *mixture.scattered(gradients)

    inputs = (tokens, tokens, tokens, tokens, *mixture.weight_specs(mixture.layout.compute))
    outputs = (tokens, tokens, *mixture.gradient_specs)
    by_x, by_weights, *parts = mixture.sharded(local, inputs, outputs)(cotangent, *saved)
    return by_x, None, by_weights, None, *mixture.with_frozen(parts)


_mixed.defvjp(_mixed_forward, _mixed_backward)
