"""A mixture of experts in place of a layer's MLP: experts are chosen, exchanged and computed.

    y = sum over the experts e of a token of: weight_e * down_e(activation(gate_e(x)) * up_e(x)),  plus a shared MLP

No token is dropped: a device sorts its (token, expert) pairs by expert, and multiplies each expert's rows by its
matrices (`gregale.model.kernels.grouped`). All experts' weights are gathered for that, like those of other layers; or,
if `compute` splits `experts`, tokens are sent to the devices of their experts. The code of a device is in
`jax.shard_map`, forward and backward, so that what is summed over which mesh axis is written down: outputs over that of
`mlp`, gradients of weights over those of tokens, nothing over `replica`.

In an exchange each device has `experts / devices` of the experts. A round sends a fixed number of rows to each of them,
a little more than an even share, by one all-to-all. If one device gets more, further rounds send the rest. The number
of rounds is the largest of the group, so that all its devices take part in each.
"""

from collections.abc import Callable, Iterable, Sequence
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
from gregale.axes.layout import BATCH, EMBED, EXPERTS, POSITION, ROUTER, SHARED_GATE, Layout, unmapped_if_one
from gregale.axes.parameters import Buffer, rows_to_a_device
from gregale.model.adapters import ExpertMatrices
from gregale.model.config import BALANCE, MLP_TARGETS, DecoderConfig, ExpertsConfig, Z
from gregale.model.execution import Execution
from gregale.model.kernels.grouped import GroupedMlp
from gregale.model.kernels.grouped_int8 import Integers, integers_of
from gregale.model.kernels.operations import GATED
from gregale.model.kernels.quantised import EightBits
from gregale.model.layers import Mlp
from gregale.model.losses import Losses
from gregale.scopes import FURTHER_ROUNDS


class Sent(NamedTuple):
    """The rows that a device has got in a round, sorted by its experts."""

    sizes: jax.Array  # the rows of each expert
    order: jax.Array  # the places of sorted rows in the order of arrival
    factors: jax.Array  # the weight of each row, 0 of empty ones; [rows, 1]
    rows: list[jax.Array]


@dataclass(frozen=True)
class Exchange:
    """The computation of one device inside of `jax.shard_map`; outputs are addends over the mesh axes of `mlp`.

    Weights are those of `GroupedMlp`, of this device's experts.

    - `axes`: the mesh axes that split the experts
    - `devices`: their product
    - `group`: mesh axes whose devices have the same number of rounds
    """

    experts: int
    axes: tuple[str, ...]
    devices: int
    group: tuple[str, ...]
    mlp: GroupedMlp

    def forward(self, x, experts, weights, *matrices) -> jax.Array:
        """Return the sum of each token's experts, float32 [tokens..., embed]."""
        route = Route(self, experts)

        def one(number) -> jax.Array:
            sent = route.sent(number, weights, x)
            inner = self.mlp.inner(sent.rows[0], sent.sizes, matrices)
            out = self.mlp.outer(inner, sent.factors.astype(x.dtype), sent.sizes, matrices)
            return route.summed(route.returned(number, out, sent), x.shape)

        return route.over_rounds(one)

    def backward(self, cotangent, x, experts, weights, *matrices) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the gradients by x, by the weights of tokens, and by the weights of this device's experts."""
        route = Route(self, experts)

        def one(number) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            sent = route.sent(number, weights, x, cotangent)
            (rows, by_rows), factors = sent.rows, sent.factors.astype(x.dtype)
            inner = self.mlp.inner(rows, sent.sizes, matrices)
            by_x, by_weights, gradients = self.mlp.backward(rows, by_rows, inner, factors, sent.sizes, matrices)
            by_x = route.summed(route.returned(number, by_x, sent), x.shape)
            return by_x, route.returned(number, by_weights[:, None], sent).reshape(weights.shape), gradients

        return route.over_rounds(one)


class Route:
    """The places of a device's (token, expert) pairs: sorted by expert, and so by device."""

    def __init__(self, exchange: Exchange, experts: jax.Array):
        self.exchange, self.active = exchange, experts.shape[-1]
        devices, self.own = exchange.devices, exchange.experts // exchange.devices
        self.flat = experts.reshape(-1)
        self.each = rows_to_a_device(self.flat.size, devices)
        self.device = self.flat // self.own
        self.order = jnp.argsort(self.flat, stable=True).astype(jnp.int32)
        self.places = inverse(self.order)
        self.counts = (self.device[:, None] == jnp.arange(devices)).sum(0, dtype=jnp.int32)
        self.starts = jnp.cumsum(self.counts) - self.counts
        self.rounds = jax.lax.pmax(-(-self.counts.max() // self.each), exchange.group)

    def sent(self, number, weights: jax.Array, *tokens: jax.Array) -> Sent:
        """Send a round's rows of some arrays [tokens..., n] to the devices of their experts."""
        places = number * self.each + jnp.arange(self.each)
        held = places < self.counts[:, None]
        pairs = self.order.at[self.starts[:, None] + places].get(mode="clip")  # [devices, each]
        experts = self._across(jnp.where(held, self.flat[pairs] % self.own, self.own)).reshape(-1)
        factors = self._across(jnp.where(held, weights.reshape(-1)[pairs], 0)).reshape(-1, 1)
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        rows = [self._across(each.reshape(-1, each.shape[-1])[pairs // self.active]) for each in tokens]
        sizes = (experts[:, None] == jnp.arange(self.own)).sum(0, dtype=jnp.int32)
        return Sent(sizes, order, factors[order], [each.reshape(-1, each.shape[-1])[order] for each in rows])

    def returned(self, number, found: jax.Array, sent: Sent) -> jax.Array:
        """Send rows back to their tokens: [pairs, n], zeros for pairs of other rounds."""
        arrived = found[inverse(sent.order)].reshape(self.exchange.devices, self.each, -1)
        back = self._across(arrived).reshape(-1, arrived.shape[-1])
        place = self.places - self.starts[self.device]
        slot, here = self.device * self.each + place % self.each, place // self.each == number
        return jnp.where(here[:, None], back[slot], 0)

    def summed(self, pairs: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the sum of each token's pairs, float32."""
        return pairs.reshape(*shape[:-1], self.active, shape[-1]).sum(-2, dtype=jnp.float32)

    def over_rounds(self, one: Callable[[Any], Any]) -> Any:
        """Return the sum of all rounds; in practice the first is the only one."""

        def further(carry):
            return carry[0] + 1, jax.tree.map(jnp.add, carry[1], one(carry[0]))

        first = (jnp.int32(1), one(0))
        with jax.named_scope(FURTHER_ROUNDS):
            return jax.lax.while_loop(lambda carry: carry[0] < self.rounds, further, first)[1]

    def _across(self, parts: jax.Array) -> jax.Array:
        """Exchange [devices, ...]: part d goes to device d."""
        return jax.lax.all_to_all(parts, self.exchange.axes, 0, 0)


def inverse(order: jax.Array) -> jax.Array:
    """Return the place of each number in an order."""
    numbers = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)


LOAD = "load"
IMBALANCE = "expert_imbalance"  # the balance loss over `active`: 1 for equal numbers of tokens
TOKENS = (BATCH, POSITION)


class Routing(NamedTuple):
    """The experts of each token, [batch, position, active] each."""

    experts: jax.Array  # int32
    weights: jax.Array  # float32


def choose(
    logits: NamedArray, bias: NamedArray | None, config: ExpertsConfig, execution: Execution
) -> tuple[Routing, NamedArray]:
    """Return each token's experts, and the scores of its logits [batch, position, router], float32.

        scores = softmax(logits), or the sigmoid
        experts = the `active` with the largest scores + bias, in the best groups
        weights = their scores, over their sum with `renormalise`, times `scale`

    The score of a group is the sum of its two largest scores (DeepSeek V3, arXiv 2412.19437). Of experts with the same
    score the first is taken.

    - `bias`: [router], without a gradient
    """
    Experts, layout = logits.resolve_axis(ROUTER), execution.layout
    scores = hax.nn.softmax(logits, ROUTER) if config.score == "softmax" else hax.nn.sigmoid(logits)
    order = jax.lax.stop_gradient(scores.array if bias is None else scores.array + bias.array)
    spec = layout.spec(TOKENS, layout.compute)
    best = unmapped_if_one(partial(_best, config))
    experts = layout.shard_map(best, (spec,), spec)(order)
    chosen = experts[..., None] == jnp.arange(Experts.size)
    weights = jnp.where(chosen, scores.array[:, :, None], 0).sum(-1)
    if config.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * config.scale), scores


def router_logits(x: NamedArray, router: NamedArray, dtype: str, execution: Execution) -> NamedArray:
    """Return x . router, float32: [batch, position, embed], [embed, n] -> [batch, position, n].

    - `dtype`: of the operands, `float32` or `dtype`, which they have
    """
    x = x.rearrange((*TOKENS, EMBED))
    found: Any = _logits((x.axes, router.axes, execution.layout, dtype), x.array, router.array)
    return execution.placed(NamedArray(found, (*TOKENS, router.axes[1].name)))


def _best(config: ExpertsConfig, order: jax.Array) -> jax.Array:
    if config.active_groups < config.groups:
        grouped = order.reshape(*order.shape[:-1], config.groups, -1)
        of_group = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        kept = jax.lax.top_k(of_group, config.active_groups)[1]
        held = (kept[..., None] == jnp.arange(config.groups)).any(-2)
        order = jnp.where(held[..., None], grouped, -jnp.inf).reshape(order.shape)
    return jax.lax.top_k(order, config.active)[1]


def routing_sums(
    choice: Routing, logits: NamedArray, scores: NamedArray, mask: NamedArray, config: ExpertsConfig
) -> dict[str, NamedArray]:
    """Return sums of a layer over the tokens of each row, as they weigh in the loss: [batch, ...], float32.

    - `load`, [batch, router]: the tokens of each expert
    - `balance_loss`: tokens * experts * sum_e (share of tokens of e) * (mean score of e), where shares sum to
      `active` and the scores of a token to 1 (Switch Transformers, arXiv 2101.03961). A row's own shares and means, so
      that it is the same in any microbatch and on any mesh
    - `router_z_loss`: the sum of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906)

    - `mask`: the weights of tokens, [batch, position]
    """
    Experts = logits.resolve_axis(ROUTER)
    mask = mask.rearrange(TOKENS).astype(jnp.float32)
    taken = (choice.experts[..., None] == jnp.arange(Experts.size)).sum(2)
    load = hax.sum(NamedArray(taken, (*TOKENS, ROUTER)) * mask, POSITION)
    likely = scores if config.score == "softmax" else scores / (hax.sum(scores, ROUTER) + 1e-20)
    tokens = hax.maximum(hax.sum(mask, POSITION), 1e-20)
    balance = Experts.size * hax.sum(load * hax.sum(likely * mask, POSITION), ROUTER) / tokens
    z = hax.sum(hax.square(hax.nn.logsumexp(logits, ROUTER)) * mask, POSITION)
    return {LOAD: load, BALANCE: balance, Z: z}


def with_balance(losses: Losses, config: ExpertsConfig, sums: dict[str, NamedArray]) -> Losses:
    """Return the losses of a batch with the terms of its layers' experts.

    - `sums`: `routing_sums`, each with an axis of layers, or those of all rows
    """

    def over_rows(name: str) -> jax.Array:
        array = sums[name]
        return hax.sum(array).scalar() / array.axes[0].size

    coefficients = {BALANCE: config.balance.loss, Z: config.balance.z_loss}
    terms = {name: by * over_rows(name) for name, by in coefficients.items() if by}
    metrics = {IMBALANCE: over_rows(BALANCE) / config.active}
    load = hax.sum(sums[LOAD], BATCH) if sums[LOAD].has_axis(BATCH) else sums[LOAD]
    return losses._replace(auxiliary={**losses.auxiliary, **terms}, metrics=metrics, statistics={LOAD: load})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logits(spec, x: jax.Array, router: jax.Array) -> jax.Array:
    return jnp.einsum("bph,he->bpe", *_operands(spec, x, router), preferred_element_type=jnp.float32)


def _operands(spec, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(each.astype(jnp.float32) if spec[-1] == "float32" else each for each in arrays)


def _logits_forward(spec, x, router):
    return _logits(spec, x, router), (x, router)


def _logits_backward(spec, saved, cotangent):
    """Return the gradients by a product on each device: the partitioner would send them in a ring."""
    axes_of_x, axes_of_router, layout, _ = spec
    axes: tuple[Axis, ...] = axes_of_router
    tokens = layout.spec(axes_of_x[:2], layout.compute)

    def local(x, router, cotangent):
        exact_x, exact = _operands(spec, x, router)
        cotangent = cotangent.astype(exact.dtype)
        by_router = jnp.einsum("bph,bpe->he", exact_x, cotangent, preferred_element_type=jnp.float32)
        by_x = jnp.einsum("bpe,he->bph", cotangent, exact, preferred_element_type=jnp.float32)
        over = layout.mesh_axes(axes_of_x[:2], layout.compute)
        return by_x.astype(x.dtype), scattered(by_router.astype(router.dtype), axes, over, layout)

    whole, parts = (layout.spec(axes, mapping) for mapping in (layout.compute, layout.params))
    run = layout.shard_map(unmapped_if_one(local), (tokens, whole, tokens), (tokens, parts))
    return run(*saved, cotangent)


_logits.defvjp(_logits_forward, _logits_backward)


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

    def with_sums(
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

    def _chosen(self, x: NamedArray, choice: Routing, execution: Execution) -> NamedArray:
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
        layer = GroupedExperts(x.axes, axes, mlp, execution.layout)
        found: Any = _mixed(layer, x.array, *choice, integers, *(weight.array for weight in weights))
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
class GroupedExperts:
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
def _mixed(layer: GroupedExperts, x, experts, weights, integers: tuple[Integers, ...], *matrices) -> jax.Array:
    """Return the sum over each token's experts, [batch, position, embed].

    - `experts`, `weights`: [batch, position, active], see `Routing`
    - `integers`: those of the first matrices, which products take in their place; they get all of the gradient
    - `matrices`: the weights of `GroupedMlp`
    """
    return _mixed_forward(layer, x, experts, weights, integers, *matrices)[0]


def _mixed_forward(layer: GroupedExperts, x, experts, weights, integers, *matrices):
    matrices = (*integers, *matrices[len(integers) :])
    if layer.expert_axes:
        return _exchanged(layer, x, experts, weights, *matrices), (x, experts, weights, *matrices)
    mlp, over = layer.mlp, layer.mlp_axes

    def local(x, experts, weights, *matrices):
        order = layer.order(experts)
        rows = _of_tokens(order, experts.shape[-1], x)
        saved = Saved(order, *mlp.inner(rows, order.sizes, matrices))
        factors = weights.reshape(-1)[order.pairs][:, None].astype(x.dtype)
        out = mlp.outer(saved[1:], factors, order.sizes, matrices)
        out = _summed(order, out, x.shape[:2]).astype(x.dtype)
        return (jax.lax.psum(out, over) if over else out), saved

    tokens, saved = layer.token_spec, layer.saved_specs
    inputs = (tokens, tokens, tokens, *layer.weight_specs(layer.layout.compute))
    out, kept = layer.sharded(local, inputs, (tokens, saved))(x, experts, weights, *matrices)
    kept = kept._replace(gate=checkpoint_name(kept.gate, "gate"), up=checkpoint_name(kept.up, "up"))
    return out, (kept, x, weights, *matrices)


def _mixed_backward(layer: GroupedExperts, saved, cotangent):
    if layer.expert_axes:
        return _exchanged_backward(layer, saved, cotangent)
    layout, over = layer.layout, layer.mlp_axes

    def local(cotangent, saved: Saved, x, weights, *matrices):
        order, active = saved.order, weights.shape[-1]
        rows, by_rows = (_of_tokens(order, active, each) for each in (x, cotangent))
        factors = weights.reshape(-1)[order.pairs][:, None].astype(x.dtype)
        by_x, by_weights, gradients = layer.mlp.backward(rows, by_rows, saved[1:], factors, order.sizes, matrices)
        by_x = _summed(order, by_x, x.shape[:2]).astype(x.dtype)
        by_weights = by_weights[order.places].reshape(weights.shape)
        by_x, by_weights = jax.lax.psum((by_x, by_weights), over) if over else (by_x, by_weights)
        return by_x, by_weights.astype(weights.dtype), *layer.scattered(gradients)

    tokens, compute = layer.token_spec, layer.weight_specs(layout.compute)
    inputs = (tokens, layer.saved_specs, tokens, tokens, *compute)
    outputs = (tokens, tokens, *layer.gradient_specs)
    by_x, by_weights, *parts = layer.sharded(local, inputs, outputs)(cotangent, *saved)
    return by_x, None, by_weights, None, *layer.with_frozen(parts)


def _exchanged(layer: GroupedExperts, x, experts, weights, *matrices) -> jax.Array:
    over, tokens = layer.mlp_axes, layer.token_spec

    def local(x, *more):
        out = layer.exchange.forward(x, *more).astype(x.dtype)
        return jax.lax.psum(out, over) if over else out

    inputs = (tokens, tokens, tokens, *layer.weight_specs(layer.layout.compute))
    return layer.sharded(local, inputs, tokens)(x, experts, weights, *matrices)


def _exchanged_backward(layer: GroupedExperts, saved, cotangent):
    over, tokens = layer.mlp_axes, layer.token_spec

    def local(cotangent, x, experts, weights, *matrices):
        by_x, by_weights, gradients = layer.exchange.backward(cotangent, x, experts, weights, *matrices)
        by_x = by_x.astype(x.dtype)
        by_x, by_weights = jax.lax.psum((by_x, by_weights), over) if over else (by_x, by_weights)
        return by_x, by_weights.astype(weights.dtype), *layer.scattered(gradients)

    inputs = (tokens, tokens, tokens, tokens, *layer.weight_specs(layer.layout.compute))
    outputs = (tokens, tokens, *layer.gradient_specs)
    by_x, by_weights, *parts = layer.sharded(local, inputs, outputs)(cotangent, *saved)
    return by_x, None, by_weights, None, *layer.with_frozen(parts)


_mixed.defvjp(_mixed_forward, _mixed_backward)
