"""A model: instead of attention, each layer mixes the last few tokens with learned weights."""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear

from gregale.axes.layout import EMBED, LAYERS
from gregale.model.config import SHAPE, ModelConfig
from gregale.model.embedding import embed
from gregale.model.layers import RmsNorm, linear
from gregale.model.loss import next_token_loss
from gregale.settings import setting, whole


@ModelConfig.register_subclass("causal_mixer")
@dataclass(frozen=True)
class MixerConfig(ModelConfig):
    """Layers of a short causal convolution and a feed-forward network."""

    layers: int = setting(2, "number of layers", range=whole(1), fixed=SHAPE)
    hidden: int = setting(64, "width of the residual stream", range=whole(1), fixed=SHAPE)
    reach: int = setting(8, "tokens that a layer mixes", range=whole(1), fixed=SHAPE)

    def init(self, Vocab: Axis, key) -> Mixer:
        table, *layers = jax.random.split(key, 1 + self.layers)
        Layers, Embed = Axis(LAYERS, self.layers), Axis(EMBED, self.hidden)
        stacked = hax.vmap(lambda key: Layer.init(Embed, self.reach, key), Layers)(jnp.stack(layers))
        return Mixer(hax.random.normal(table, (Vocab, Embed)) * 0.02, stacked, RmsNorm(hax.ones(Embed), 1e-5))

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        mlp = Axis("mlp", 4 * self.hidden)
        return {
            "model.hidden": ("the width of the residual stream", Axis(EMBED, self.hidden)),
            "4 x model.hidden": ("the width of the feed-forward network", mlp),
        }


class Layer(eqx.Module):
    taps: NamedArray  # [Reach, Embed]
    up: Linear  # [Embed] -> [Mlp]
    down: Linear  # [Mlp] -> [Embed]
    norm: RmsNorm  # [Embed]

    @staticmethod
    def init(Embed: Axis, reach: int, key) -> Layer:
        Reach, Mlp, keys = Axis("reach", reach), Axis("mlp", 4 * Embed.size), jax.random.split(key, 3)
        taps = hax.random.normal(keys[0], (Reach, Embed)) / reach
        up, down = linear(Embed, Mlp, 0.02, keys[1]), linear(Mlp, Embed, 0.02, keys[2])
        return Layer(taps, up, down, RmsNorm(hax.ones(Embed), 1e-5))

    def __call__(self, x: NamedArray, positions: NamedArray, execution) -> NamedArray:
        before = self.norm(x, execution).rearrange(("batch", "position", EMBED))
        for back in range(self.taps.resolve_axis("reach").size):
            earlier = jnp.pad(before.array, ((0, 0), (back, 0), (0, 0)))[:, : before.array.shape[1]]
            seen = (positions >= back).astype(before.dtype)  # a token of another document is not seen
            x = x + NamedArray(earlier, before.axis_names) * self.taps["reach", back] * seen
        hidden = execution.placed(hax.nn.silu(execution.project(self.up, self.norm(x, execution))))
        return execution.placed(x + execution.project(self.down, hidden))


class Mixer(eqx.Module):
    embedding: NamedArray  # [Vocab, Embed], also the head
    layers: Layer  # every array with a leading [Layers]
    norm: RmsNorm  # [Embed]

    def hidden(self, batch, execution) -> NamedArray:
        def layer(x, weights, kind, rows, execution):
            return execution.gathered(weights)(x, rows["positions"], execution)

        x = execution.placed(embed(self.embedding, batch["tokens"], execution))
        kinds = (0,) * self.layers.taps.resolve_axis(LAYERS).size  # all layers are alike
        x = execution.run_layers(layer, kinds, x, self.layers, {"positions": batch["positions"]})
        return execution.gathered(self.norm)(x, execution)

    def head(self, execution) -> NamedArray:
        return execution.gathered(self.embedding).rearrange((EMBED, "vocab"))

    def loss(self, batch, execution):
        targets, mask = batch["targets"], batch["loss_mask"]
        loss = next_token_loss(self.hidden(batch, execution), self.head(execution), targets, mask, execution)
        return loss, hax.sum(mask).scalar()

    def logits(self, batch, execution) -> NamedArray:
        return hax.dot(self.hidden(batch, execution), self.head(execution), axis=EMBED)
