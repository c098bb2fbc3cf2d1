"""The Llama family: embedding, a stack of blocks scanned along `layers`, a norm, a head."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear

from gregale.axes.layout import BATCH, LAYERS, is_named, is_parameter
from gregale.model.attention import Attention, linear
from gregale.model.cache import POSITION, Cache, Turn, slots_of
from gregale.model.config import LlamaConfig
from gregale.model.embedding import embed
from gregale.model.execution import Execution, named
from gregale.model.loss import next_token_loss
from gregale.model.norm import RmsNorm
from gregale.model.scores import target_scores


class Mlp(eqx.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    gate: Linear  # [Embed] -> [Mlp]
    up: Linear  # [Embed] -> [Mlp]
    down: Linear  # [Mlp] -> [Embed]

    @staticmethod
    def init(config: LlamaConfig, key) -> Mlp:
        keys = jax.random.split(key, 3)
        c = config
        return Mlp(
            gate=linear(c.Embed, c.Mlp, c.init_scale, keys[0]),
            up=linear(c.Embed, c.Mlp, c.init_scale, keys[1]),
            down=linear(c.Mlp, c.Embed, c.init_scale / (2 * c.layers) ** 0.5, keys[2]),
        )

    def __call__(self, x: NamedArray, execution: Execution) -> NamedArray:
        gate = named(execution.placed(execution.kernels.project(self.gate, x)), "gate")
        up = named(execution.placed(execution.kernels.project(self.up, x)), "up")
        return named(execution.kernels.project(self.down, execution.kernels.swiglu(gate, up)), "mlp_out")


class Block(eqx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); with norms after, x + norm(attention(x)) and so on."""

    attention_norm: RmsNorm  # [Embed]
    attention: Attention
    mlp_norm: RmsNorm  # [Embed]
    mlp: Mlp
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, key) -> Block:
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=norm(config),
            attention=Attention.init(config, attention_key),
            mlp_norm=norm(config),
            mlp=Mlp.init(config, mlp_key),
            config=config,
        )

    def __call__(self, x, positions, segments, execution: Execution) -> NamedArray:
        attended = self.attention(self.taken(self.attention_norm, x, execution), positions, segments, execution)
        x = execution.placed(x + self.given(self.attention_norm, attended, execution))
        return execution.placed(x + self._fed(x, execution))

    def prefill(self, x, positions, segments, slots: int, execution: Execution) -> tuple[NamedArray, Cache]:
        taken = self.taken(self.attention_norm, x, execution)
        return self._after(x, *self.attention.prefill(taken, positions, segments, slots, execution), execution)

    def decode(self, x, cache: Cache, turn: Turn, execution: Execution) -> tuple[NamedArray, Cache]:
        attended = self.attention.decode(self.taken(self.attention_norm, x, execution), cache, turn, execution)
        return self._after(x, *attended, execution)

    def _after(self, x, attended, cache: Cache, execution: Execution) -> tuple[NamedArray, Cache]:
        x = x + self.given(self.attention_norm, attended, execution)
        return x + self._fed(x, execution), cache

    def _fed(self, x, execution: Execution) -> NamedArray:
        fed = self.mlp(self.taken(self.mlp_norm, x, execution), execution)
        return self.given(self.mlp_norm, fed, execution)

    def taken(self, norm: RmsNorm, x: NamedArray, execution: Execution) -> NamedArray:
        """What half a layer takes of the stream."""
        return norm(x, execution) if self.config.norms == "before" else x

    def given(self, norm: RmsNorm, x: NamedArray, execution: Execution) -> NamedArray:
        """What half a layer adds to the stream."""
        return norm(x, execution) if self.config.norms == "after" else x


class Llama(eqx.Module):
    """A decoder-only language model of the Llama family."""

    embedding: NamedArray  # [Vocab, Embed]
    blocks: Block  # every array with a leading [Layers]
    norm: RmsNorm  # [Embed]
    head: NamedArray | None  # [Embed, Vocab]; None: the embedding, transposed
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, Vocab: Axis, key) -> Llama:
        table_key, head_key, blocks_key = jax.random.split(key, 3)
        keys = jax.random.split(blocks_key, config.layers)
        return Llama(
            embedding=hax.random.normal(table_key, (Vocab, config.Embed)) * config.init_scale,
            blocks=hax.vmap(lambda key: Block.init(config, key), config.Layers)(keys),
            norm=norm(config),
            head=None if config.tied_head else hax.random.normal(head_key, (config.Embed, Vocab)) * config.init_scale,
            config=config,
        )

    def hidden(self, tokens, positions, segments, execution: Execution) -> NamedArray:
        """The normalised output of the last block: [Batch, Position] -> [Batch, Position, Embed].

        Arguments:
        - `tokens`: integers [Batch, Position]
        - `positions`: integers [Batch, Position], each token's place in its document
        - `segments`: integers [Batch, Position]; attention stays inside a segment. None: one segment
        """
        x = execution.placed(embed(self.embedding, tokens, execution))

        def block(x, weights, rows, execution):
            return execution.gathered(weights)(x, rows["positions"], rows["segments"], execution)

        rows = {"positions": positions, "segments": segments}
        x = execution.run_layers(block, self.config.Layers, x, self.blocks, rows)
        return execution.gathered(self.norm)(x, execution)

    def output_head(self, execution: Execution) -> NamedArray:
        """The gathered head [Embed, Vocab]."""
        head = self.embedding if self.head is None else self.head
        Embed = self.config.Embed
        return execution.gathered(head).rearrange((Embed, ...))

    def scores(
        self, batch: dict[str, NamedArray], vocabulary: int, execution: Execution
    ) -> tuple[NamedArray, NamedArray]:
        """The log-likelihood (nats, float32) of every target, and whether it is the likeliest: [Batch, Position] each.

        - `batch`: as of `loss`; its mask is left out of account
        - `vocabulary`: rows of the tables that are tokens; those that fill them up are none
        """
        hidden = self.hidden(batch["tokens"], batch["positions"], batch.get("segment_ids"), execution)
        return target_scores(hidden, self.output_head(execution), batch["targets"], vocabulary, execution)

    def loss(self, batch: dict[str, NamedArray], execution: Execution) -> tuple[jax.Array, jax.Array]:
        """Sum of the masked next-token losses (nats) and the sum of the mask, both float32 scalars.

        `batch` has `tokens`, `targets`, `loss_mask`, `positions` and, if attention stays inside documents,
        `segment_ids`, each [Batch, Position].
        """
        hidden = self.hidden(batch["tokens"], batch["positions"], batch.get("segment_ids"), execution)
        mask = batch["loss_mask"]
        loss = next_token_loss(hidden, self.output_head(execution), batch["targets"], mask, execution)
        return loss, hax.sum(mask).scalar()

    def attention_logit_maxima(self, batch: dict[str, NamedArray], execution: Execution) -> NamedArray:
        """The largest attention logit of each layer on a batch as of `loss`: float32 [Layers]."""
        positions, segments = batch["positions"], batch.get("segment_ids")

        def block(x, weights):
            ready = execution.gathered(weights)
            taken = ready.taken(ready.attention_norm, x, execution)
            largest = ready.attention.largest_logits(taken, positions, segments, execution)
            return ready(x, positions, segments, execution), largest

        x = execution.placed(embed(self.embedding, batch["tokens"], execution))
        _, largest = execution.scan_layers(block, self.config.Layers, x, self.blocks)
        return hax.max(largest, axis=(BATCH, self.config.KvHeads.name))  # type: ignore[arg-type]

    def unstacked(self) -> Llama:
        """The same with a tuple of blocks, one a layer: a program reads them where they lie, and cuts none out."""

        def block(i: int) -> Block:
            return jax.tree.map(lambda leaf: leaf[LAYERS, i], self.blocks, is_leaf=is_named)

        return eqx.tree_at(lambda model: model.blocks, self, tuple(block(i) for i in range(self.config.layers)))

    def prefill(
        self, tokens: NamedArray, first: NamedArray, slots: int, execution: Execution
    ) -> tuple[NamedArray, Any]:
        """Logits [Batch, Vocab] (float32) for what follows prompts that all end with the last of `tokens`.

        Returns the logits and the caches of the layers, with `slots` slots each: stacked if the blocks are, else a
        tuple.

        Arguments:
        - `tokens`: integers [Batch, Position]; what lies before a row's first token is filling, which nothing sees
        - `first`: the place of each row's first token, integers [Batch]
        - `slots`: as many as there are tokens at least, or as the sliding window is wide
        """
        x = embed(self.embedding, tokens, execution)
        Position = x.resolve_axis(POSITION)
        positions = hax.arange(Position).broadcast_axis(first.axes) - first
        segments = (positions >= 0).astype(jnp.int32)

        def block(x, weights):
            return execution.gathered(weights).prefill(x, positions, segments, slots, execution)

        x, caches = execution.scan_layers(block, self.config.Layers, x, self.blocks)
        return self._logits(x[POSITION, Position.size - 1], execution), caches

    def decode(
        self, tokens: NamedArray, caches, place, first: NamedArray, execution: Execution
    ) -> tuple[NamedArray, Any]:
        """Logits [Batch, Vocab] (float32) for what follows `tokens` [Batch, Position 1], which stand at a place.

        The caches hold the places before; returns the logits and the caches with this one. `first` is as for `prefill`.
        """
        x = embed(self.embedding, tokens, execution)
        turn = Turn.at(place, first, slots_of(caches), self.config.sliding_window)

        def block(x, weights, cache):
            return execution.gathered(weights).decode(x, cache, turn, execution)

        x, caches = execution.scan_layers(block, self.config.Layers, x, self.blocks, caches)
        return self._logits(x[POSITION, 0], execution), caches

    def _logits(self, x: NamedArray, execution: Execution) -> NamedArray:
        x = execution.gathered(self.norm)(x, execution)
        return hax.dot(x, self.output_head(execution), axis=self.config.Embed, preferred_element_type=jnp.float32)


def norm(config: LlamaConfig) -> RmsNorm:
    return RmsNorm.init(config.Embed, config.norm_epsilon)


def parameter_count(model) -> int:
    """Number of values in all parameters of a model; works on abstract ones."""
    return sum(leaf.size for leaf in jax.tree.leaves(model) if is_parameter(leaf))
