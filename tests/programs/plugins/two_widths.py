"""Plugins of tests: Llama whose layers have MLPs of two widths, and one that also has a buffer."""

from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import jax.numpy as jnp

from gregale.axes.parameters import Buffer
from gregale.model.config import SHAPE, ModelConfig
from gregale.model.llama import Llama, LlamaConfig
from gregale.model.losses import Losses
from gregale.settings import setting, whole


@ModelConfig.register_subclass("two_widths")
@dataclass(frozen=True)
class TwoWidthsConfig(LlamaConfig):
    wide: int = setting(96, "width of the MLP of wide layers", range=whole(1), fixed=SHAPE)
    wide_layers: tuple[int, ...] = setting((), "wide layers, from 0", range=whole(0), unique=True, fixed=SHAPE)

    @property
    def structure_numbers(self):
        return tuple(int(layer in self.wide_layers) for layer in range(self.layers))

    def structure(self, number):
        return replace(self, mlp=self.wide) if number else self


class Counting(Llama):
    """Counts the tokens that it was trained on."""

    tokens: Buffer = eqx.field(default_factory=lambda: Buffer(hax.zeros((), dtype=jnp.int32)))

    def loss(self, batch, execution):
        loss, weight = super().loss(batch, execution)
        return Losses(loss, weight, statistics={"tokens": hax.named(weight, ())})

    def update_buffers(self, statistics, weight):
        tokens = Buffer(self.tokens.value + statistics["tokens"].astype(jnp.int32))
        return eqx.tree_at(lambda model: model.tokens, self, tokens)


@ModelConfig.register_subclass("counting")
@dataclass(frozen=True)
class CountingConfig(TwoWidthsConfig):
    def init(self, Vocab, key):
        return Counting.init(self, Vocab, key)
