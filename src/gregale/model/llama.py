"""The Llama family: embedding, a stack of blocks scanned along `layers`, a norm, a head."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, LAYERS, POSITION, ROUTER, is_named
from gregale.axes.parameters import Stacks, in_layer_order, layer_order, position_order, stack_axis
from gregale.errors import KeyedError
from gregale.model.cache import Cache, DecodeStep, Devices, slots_of
from gregale.model.config import ACTIVATIONS, MEANING, SHAPE, DecoderConfig, ExpertsConfig, ModelConfig
from gregale.model.embedding import embed
from gregale.model.execution import Execution, Kind
from gregale.model.experts import LOAD, Experts, with_balance
from gregale.model.kernels.operations import capped
from gregale.model.layers import Attention, Mlp, RmsNorm
from gregale.model.loss import losses_of_head, target_scores
from gregale.model.losses import LARGEST_LOGITS, Z_LOSS, Losses
from gregale.model.parametrisation import scaled
from gregale.settings import above, at_least, restated, setting


class Block(eqx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); with norms after, x + norm(attention(x)) and so on.

    With norms around, x + out_norm(attention(norm(x))) and so on.
    """

    attention_norm: RmsNorm  # [Embed]
    attention: Attention
    attention_out_norm: RmsNorm | None  # [Embed]
    mlp_norm: RmsNorm  # [Embed]
    mlp: Mlp | Experts
    mlp_out_norm: RmsNorm | None  # [Embed]
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, key) -> "Block":
        attention_key, mlp_key = jax.random.split(key)
        around = config.norms == "around"
        return Block(
            attention_norm=norm(config),
            attention=Attention.init(config, attention_key),
            attention_out_norm=norm(config) if around else None,
            mlp_norm=norm(config),
            mlp=Mlp.init(config, mlp_key, config.Mlp) if config.experts is None else Experts.init(config, mlp_key),
            mlp_out_norm=norm(config) if around else None,
            config=config,
        )

    def __call__(self, x, positions, segments, kind: Kind, execution: Execution) -> NamedArray:
        return self.with_sums(x, positions, segments, None, kind, execution)[0]

    def with_sums(
        self, x, positions, segments, mask, kind: Kind, execution: Execution, square=None
    ) -> tuple[NamedArray, dict[str, NamedArray]]:
        """Return the layer's output, the `routing_sums` of its experts if there is a mask, and attention's logits."""
        x = execution.sequence_scatter(x)
        attended, logits = self.attention(self.attends_to(x, execution, square), positions, segments, kind, execution)
        x = execution.sequence_sharded(x + self._attention_out(attended, execution))
        fed, sums = self._mlp_out(x, execution, mask)
        return execution.sequence_sharded(x + fed), {**sums, **logits}

    def prefill(self, x, positions, segments, slots: int, kind: Kind, execution: Execution) -> tuple[NamedArray, Cache]:
        taken = self.attends_to(x, execution)
        attended = self.attention.prefill(taken, positions, segments, slots, kind, execution)
        return self._after(x, *attended, execution)

    def decode(self, x, cache: Cache, turn: DecodeStep, kind: Kind, execution: Execution) -> tuple[NamedArray, Cache]:
        attended = self.attention.decode(self.attends_to(x, execution), cache, turn, kind, execution)
        return self._after(x, *attended, execution)

    def _after(self, x, attended, cache: Cache, execution: Execution) -> tuple[NamedArray, Cache]:
        x = x + self._attention_out(attended, execution)
        return x + self._mlp_out(x, execution)[0], cache

    def attends_to(self, x, execution: Execution, square: NamedArray | None = None) -> NamedArray:
        """Return the input of attention; `square`: the mean square of `x`, if it is known."""
        return self._pre_norm(self.attention_norm, x, execution, square)

    def _attention_out(self, attended, execution: Execution) -> NamedArray:
        return self._post_norm(self.attention_norm, self.attention_out_norm, attended, execution)

    def _mlp_out(self, x, execution: Execution, mask=None) -> tuple[NamedArray, dict[str, NamedArray]]:
        fed, sums = self.mlp.with_sums(self._pre_norm(self.mlp_norm, x, execution), mask, execution)
        return self._post_norm(self.mlp_norm, self.mlp_out_norm, fed, execution), sums

    def _pre_norm(self, norm: RmsNorm, x: NamedArray, execution: Execution, square=None) -> NamedArray:
        """Return the input of half a layer."""
        return execution.sequence_gather(x if self.config.norms == "after" else norm(x, execution, square))

    def _post_norm(self, norm: RmsNorm, out_norm: RmsNorm | None, x: NamedArray, execution: Execution) -> NamedArray:
        """Return the output that half a layer adds to the stream."""
        last = norm if self.config.norms == "after" else out_norm
        return x if last is None else last(x, execution)


class Llama(eqx.Module):
    """A decoder-only language model of the Llama family."""

    embedding: NamedArray  # [Vocab, Embed]
    blocks: Block | Stacks  # every array with a leading [Layers]
    norm: RmsNorm  # [Embed]
    head: NamedArray | None  # [Embed, Vocab]; None: the embedding, transposed
    config: DecoderConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: DecoderConfig, Vocab: Axis, key) -> Self:
        table_key, head_key, blocks_key = jax.random.split(key, 3)
        keys, order = jax.random.split(blocks_key, config.layers), config.structure_numbers

        def stack(structure: int) -> Block:
            own = keys[np.flatnonzero(np.asarray(order) == structure)]
            init = partial(Block.init, config.structure(structure))
            return hax.vmap(init, Axis(stack_axis(structure), len(own)))(own)

        stacks = [stack(structure) for structure in range(max(order) + 1)]
        return cls(
            embedding=hax.random.normal(table_key, (Vocab, config.Embed)) * config.init_scale,
            blocks=stacks[0] if len(stacks) == 1 else Stacks(stacks, order),
            norm=norm(config),
            head=None if config.tied_head else hax.random.normal(head_key, (config.Embed, Vocab)) * config.init_scale,
            config=config,
        )

    def hidden(self, tokens, positions, segments, execution: Execution) -> NamedArray:
        """Return the normalised output of the last block: [Batch, Position] -> [Batch, Position, Embed].

        - `tokens`: integers [Batch, Position]
        - `positions`: integers [Batch, Position], each token's index in its document
        - `segments`: integers [Batch, Position]; attention stays inside a segment. None: one segment
        """
        return self._hidden_and_sums(tokens, positions, segments, None, execution)[0]

    def _hidden_and_sums(self, tokens, positions, segments, mask, execution: Execution) -> tuple[NamedArray, Any]:
        """Return `hidden`, and what layers return beside their output, see `Block.with_sums`."""
        x = execution.sequence_sharded(self._embedded(tokens, execution))

        def block(x, weights, kind, rows, execution, square=None):
            return execution.gathered_layer(weights).with_sums(x, **rows, kind=kind, execution=execution, square=square)

        rows = {"positions": positions, "segments": segments, "mask": mask if self.config.experts else None}
        x, sums = execution.run_layers_with_outs(block, self.config.kind_numbers, x, self.blocks, rows)
        return execution.sequence_gather(execution.gathered(self.norm)(x, execution)), sums

    def _embedded(self, tokens: NamedArray, execution: Execution) -> NamedArray:
        x = embed(self.embedding, tokens, execution)
        return x * self.config.hidden**0.5 if self.config.scaled_embedding else x

    def output_head(self, execution: Execution) -> NamedArray:
        """Return the gathered head [Embed, Vocab]."""
        head = self.embedding if self.head is None else self.head
        Embed = self.config.Embed
        return execution.gathered(head).rearrange((Embed, ...))

    def scores(
        self, batch: dict[str, NamedArray], vocabulary: int | None, execution: Execution
    ) -> tuple[NamedArray, NamedArray]:
        """Return each target's log-likelihood (nats, float32) and whether it is the likeliest: [Batch, Position] each.

        - `batch`: as for `loss`; its mask is ignored
        - `vocabulary`: rows of the tables that are tokens, the others are padding; None: all
        """
        hidden = self.hidden(batch["tokens"], batch["positions"], batch.get("segment_ids"), execution)
        head, cap = self.output_head(execution), self.config.logit_softcap
        return target_scores(hidden, head, batch["targets"], vocabulary, execution, cap)

    def loss(self, batch: dict[str, NamedArray], execution: Execution) -> tuple[jax.Array, jax.Array] | Losses:
        """Return the sum of the masked next-token losses (nats) and the sum of the mask, both float32 scalars.

        In training it may return `Losses`: with the terms of `model.experts.balance`, and with that of `model.z_loss`.

        `batch` has `tokens`, `targets`, `loss_mask`, `positions` and, if attention stays inside documents,
        `segment_ids`, each [Batch, Position].
        """
        mask, rows = batch["loss_mask"], (batch["tokens"], batch["positions"], batch.get("segment_ids"))
        hidden, sums = self._hidden_and_sums(*rows, None if execution.evaluates else mask, execution)
        logits = self.config.logits._replace(z_loss=0.0) if execution.evaluates else self.config.logits
        given = hidden, self.output_head(execution), batch["targets"], mask, execution, logits
        (loss, z_loss), weight = losses_of_head(*given), hax.sum(mask).scalar()
        if execution.evaluates or not (self.config.experts or logits.z_loss or execution.measures_logits):
            return loss, weight
        maxima = {LARGEST_LOGITS: hax.max(_of_layers(sums, LARGEST_LOGITS), BATCH)} if execution.measures_logits else {}
        losses = Losses(loss, weight, {Z_LOSS: z_loss} if logits.z_loss else {}, maxima=maxima)
        return losses if self.config.experts is None else with_balance(losses, self.config.experts, of_experts(sums))

    def update_buffers(self, statistics: dict[str, NamedArray], weight: jax.Array) -> Self:
        """Return the model with the loads of its experts in a step, and their next biases."""
        del weight
        if self.config.experts is None:
            return self
        new = of_experts(self.blocks).mlp.after(statistics[LOAD])
        return eqx.tree_at(lambda model: of_experts(model.blocks).mlp, self, new)

    def with_logits_below(self, limit: float, maxima: dict[str, NamedArray]) -> Self:
        """Return the model with `Attention.with_logits_below` of all layers, by the largest logits of a step."""
        largest = maxima[LARGEST_LOGITS].rearrange((LAYERS, ...))
        order = np.asarray(layer_order(self.blocks))

        def scaled(structure: int, block: Block) -> Block:
            own = NamedArray(largest.array[order == structure], (stack_axis(structure), *largest.axis_names[1:]))
            return replace(block, attention=block.attention.with_logits_below(limit, own))

        if not isinstance(self.blocks, Stacks):
            return replace(self, blocks=scaled(0, self.blocks))
        return replace(
            self, blocks=replace(self.blocks, parts=[scaled(*each) for each in enumerate(self.blocks.parts)])
        )

    def attention_logit_maxima(self, batch: dict[str, NamedArray], execution: Execution) -> NamedArray:
        """Return the largest attention logit of each layer on a batch as for `loss`: float32 [Layers]."""
        positions, segments = batch["positions"], batch.get("segment_ids")

        def block(x, weights, kind):
            ready = execution.gathered_layer(weights)
            taken = ready.attends_to(x, execution)
            largest = ready.attention.largest_logits(taken, positions, segments, kind, execution)
            return ready(x, positions, segments, kind, execution), hax.max(largest, axis=(BATCH, "kv_heads"))

        x = execution.sequence_sharded(self._embedded(batch["tokens"], execution))
        _, largest = execution.scan_layers(block, self.config.kind_numbers, x, self.blocks)
        return in_layer_order(largest)

    def expert_loads(self) -> NamedArray | None:
        """Return the tokens of each expert in the last step over their mean, [layers, router]; None without experts.

        Rows of layers without experts are NaN.
        """
        if self.config.experts is None:
            return None
        load, dense = of_experts(self.blocks).mlp.load.value, self.config.dense_layers
        return NamedArray(jnp.pad(load.array, ((dense, 0), (0, 0)), constant_values=jnp.nan), (LAYERS, ROUTER))

    @property
    def window_of_all(self) -> int | None:
        """Return the window of all layers; None if some layer has none."""
        return self.config.window_of_all

    def unstacked(self) -> "Llama":
        """Return the model with a tuple of blocks, one per layer: a program reads them without slicing."""

        order = layer_order(self.blocks)

        def block(layer: int) -> Block:
            structure, row = order[layer], order[:layer].count(order[layer])
            stack = self.blocks.parts[structure] if isinstance(self.blocks, Stacks) else self.blocks
            return jax.tree.map(lambda leaf: leaf[stack_axis(structure), row], stack, is_leaf=is_named)

        return eqx.tree_at(lambda model: model.blocks, self, tuple(block(i) for i in range(self.config.layers)))

    def prefill(
        self, tokens: NamedArray, first: NamedArray, slots: int, execution: Execution
    ) -> tuple[NamedArray, Any]:
        """Return logits [Batch, Vocab] (float32) of the token after prompts that all end with the last of `tokens`.

        It also returns the caches of the layers, with `slots` slots each: stacked if the blocks are, else a tuple.

        - `tokens`: integers [Batch, Position]; tokens before a row's first token are padding, which no token sees
        - `first`: the index of each row's first token, integers [Batch]
        - `slots`: at least the number of tokens, or the width of the sliding window of all layers
        """
        Position, devices = tokens.resolve_axis(POSITION), execution.layout.context
        order = hax.named(position_order(Position.size, devices), Position)
        x = self._embedded(execution.placed(tokens[POSITION, order]), execution)
        positions = execution.placed(order.broadcast_axis(first.axes) - first)
        segments = (positions >= 0).astype(jnp.int32)

        def block(x, weights, kind):
            return execution.gathered(weights).prefill(x, positions, segments, slots, kind, execution)

        x, caches = execution.scan_layers(block, self.config.kind_numbers, x, self.blocks)
        end = Position.size - 1  # a slice of positions that devices share would gather them all
        last = x[POSITION, end] if devices == 1 else hax.sum(hax.where(order == end, x, 0), axis=Position)
        return self._logits(last, execution), caches

    def decode(
        self, tokens: NamedArray, caches, place, first: NamedArray, execution: Execution
    ) -> tuple[NamedArray, Any]:
        """Return logits [Batch, Vocab] (float32) of the token after `tokens` [Batch, Position 1], which are at an
        index.

        The caches hold the earlier indices; the returned caches include this one. `first` is as for `prefill`.
        """
        x = self._embedded(tokens, execution)
        slots, devices = slots_of(caches), Devices(execution).sharing
        turns = [DecodeStep.at(place, first, slots, kind.window, devices) for kind in self.config.kinds]

        def block(x, weights, kind, cache):
            return execution.gathered(weights).decode(x, cache, turns[kind], kind, execution)

        x, caches = execution.scan_layers(block, self.config.kind_numbers, x, self.blocks, caches)
        return self._logits(x[POSITION, 0], execution), caches

    def _logits(self, x: NamedArray, execution: Execution) -> NamedArray:
        return self.head_logits(execution.gathered(self.norm)(x, execution), execution)

    def logits(self, batch: dict[str, NamedArray], execution: Execution) -> NamedArray:
        """Return all logits of a batch as for `loss`: float32 [Batch, Position, Vocab]."""
        hidden = self.hidden(batch["tokens"], batch["positions"], batch.get("segment_ids"), execution)
        return self.head_logits(hidden, execution)

    def head_logits(self, hidden: NamedArray, execution: Execution) -> NamedArray:
        """Return the logits of `hidden`: [..., Embed] -> [..., Vocab], float32."""
        head, (cap, rows, _) = self.output_head(execution), self.config.logits
        found = hax.dot(hidden, head, axis=self.config.Embed, preferred_element_type=jnp.float32)
        found = execution.placed(found)
        bounded = NamedArray(capped(found.array, cap), found.axis_names)
        return bounded if rows is None else hax.where(hax.arange(found.resolve_axis("vocab")) < rows, bounded, -jnp.inf)


def _of_layers(sums: Any, name: str) -> NamedArray:
    """Return one of the arrays that all layers return, in the order of layers."""
    if isinstance(sums, Stacks):
        return in_layer_order(Stacks([part[name] for part in sums.parts], sums.order))
    return sums[name]


def of_experts(blocks: Any) -> Any:
    """Return the stack of the layers with experts: the last, after that of `dense_layers`."""
    return blocks.parts[-1] if isinstance(blocks, Stacks) else blocks


def norm(config: DecoderConfig) -> RmsNorm:
    return RmsNorm.init(config.Embed, config)


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3 (dense) and OLMo 2 are settings of these fields."""

    def init(self, Vocab: Axis, key: jax.Array) -> Llama:
        return scaled(Llama.init(self, Vocab, key), self.scalings, self.norm_offset)


@ModelConfig.register_subclass("gemma")
@dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """The Llama family with the additions of Gemma 2 and 3; their norms are `around`."""

    activation: str = setting(
        "silu",
        "of the gate: SwiGLU, or GeGLU by tanh (Gemma)",
        choices=ACTIVATIONS,
        aliases=("hidden_act", "hidden_activation", "activation_function"),
        fixed=MEANING,
    )
    norm_offset: float = setting(0.0, "added to the weights of RMSNorm (Gemma: 1)", range=at_least(0), fixed=MEANING)
    score_width: float | None = setting(
        None,
        "scores are divided by its root; null: head_size",
        range=above(0),
        aliases=("query_pre_attn_scalar",),
        fixed=MEANING,
    )
    score_softcap: float | None = setting(
        None,
        "bounds scores by tanh (Gemma 2); null: nothing",
        range=above(0),
        aliases=("attn_logit_softcapping", "attention_softcap"),
        fixed=MEANING,
    )
    logit_softcap: float | None = setting(
        None,
        "bounds logits by tanh (Gemma 2); null: nothing",
        range=above(0),
        aliases=("final_logit_softcapping",),
        fixed=MEANING,
    )
    scaled_embedding: bool = setting(False, "embeddings times sqrt(hidden) (Gemma)", fixed=MEANING)
    window_rotary_base: float | None = setting(
        None,
        "of layers with a window, unscaled (Gemma 3)",
        range=at_least(1),
        aliases=("rope_local_base_freq",),
        fixed=MEANING,
    )


@ModelConfig.register_subclass("gpt_oss")
@dataclass(frozen=True)
class GptOssConfig(LlamaConfig):
    """The Llama family with the additions of gpt-oss: attention sinks, biases, and experts with clipped gates."""

    sinks: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    activation: ClassVar[str] = "clipped"

    experts: ExpertsConfig | None = field(
        default_factory=ExpertsConfig, metadata={"help": "experts in place of MLPs", "fixed": SHAPE, "by_topic": True}
    )
    attention_bias: bool = restated(LlamaConfig, "attention_bias", True)

    def __post_init__(self):
        super().__post_init__()
        mlps = {"dense_layers": self.dense_layers, "experts.shared": self.experts.shared if self.experts else 0}
        for name, found in ({"experts": "null"} if self.experts is None else mlps).items():
            if found:
                raise KeyedError(name, f"is {found}", ", and a layer of type gpt_oss has experts and no other MLP.")
