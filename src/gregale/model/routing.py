"""The choice of each token's experts, and the sums by which their numbers of tokens are balanced."""

from functools import partial
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.gather import scattered
from gregale.axes.layout import BATCH, EMBED, POSITION, ROUTER, unmapped_if_one
from gregale.model.execution import Execution
from gregale.model.experts_config import BALANCE, ExpertsConfig, Z
from gregale.model.losses import Losses

LOAD = "load"
IMBALANCE = "expert_imbalance"  # the balance loss over `active`: 1 for equal numbers of tokens
TOKENS = (BATCH, POSITION)


class Choice(NamedTuple):
    """The experts of each token, [batch, position, active] each."""

    experts: jax.Array  # int32
    weights: jax.Array  # float32


def choose(
    logits: NamedArray, bias: NamedArray | None, config: ExpertsConfig, execution: Execution
) -> tuple[Choice, NamedArray]:
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
    return Choice(experts, weights * config.scale), scores


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
    choice: Choice, logits: NamedArray, scores: NamedArray, mask: NamedArray, config: ExpertsConfig
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
