"""Model configurations: the shape of a model, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import draccus
import jax.numpy as jnp
from haliax import Axis

from gregale.axes.layout import EMBED, LAYERS
from gregale.errors import UserError

REMAT = ("none", "full", "attention", "projections", "offload")
ATTENTION = ("auto", "xla", "cudnn")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def check_choice(key: str, value: str, choices) -> None:
    if value not in choices:
        raise UserError(f"{key} is {value!r}; valid choices: {', '.join(choices)}.")


@dataclass(frozen=True)
class ModelConfig(draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Configuration key -> (meaning, axis) of every axis that a mesh may split, but for the vocabulary."""
        return {}


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3's stretching of the rotary frequencies to a longer context than the model was first trained on."""

    factor: float = field(default=8.0, metadata={"help": "how much longer the context becomes"})
    low_frequency_factor: float = field(
        default=1.0, metadata={"help": "wavelengths above context / this are stretched"}
    )
    high_frequency_factor: float = field(default=4.0, metadata={"help": "wavelengths below context / this are kept"})
    original_context: int = field(default=8192, metadata={"help": "context length before the stretching, in tokens"})


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3 (dense) are settings of these fields."""

    layers: int = field(default=12, metadata={"help": "number of layers"})
    hidden: int = field(default=768, metadata={"help": "width of the residual stream"})
    heads: int = field(default=12, metadata={"help": "query heads"})
    kv_heads: int | None = field(default=None, metadata={"help": "key and value heads; null: as many as query heads"})
    head_size: int | None = field(default=None, metadata={"help": "width of a head; null: hidden / heads"})
    mlp: int = field(default=2048, metadata={"help": "width of the SwiGLU layer"})
    vocabulary: int | None = field(
        default=None, metadata={"help": "rows of the embedding; null: the tokenizer's, padded"}
    )
    tied_head: bool = field(default=False, metadata={"help": "the output head is the embedding table"})
    qk_norm: bool = field(default=False, metadata={"help": "RMSNorm on queries and keys (Qwen 3)"})
    attention_bias: bool = field(default=False, metadata={"help": "biases on query, key and value (Qwen 2)"})
    sliding_window: int | None = field(
        default=None, metadata={"help": "attend to at most this many tokens back (Mistral)"}
    )
    norm_epsilon: float = field(default=1e-5, metadata={"help": "added to the mean square in RMSNorm"})
    rotary_base: float = field(default=10000.0, metadata={"help": "base of the rotary wavelengths"})
    rotary_scaling: RotaryScaling | None = field(default=None, metadata={"help": "Llama 3 scaling; null: none"})
    init_scale: float = field(default=0.02, metadata={"help": "standard deviation of the initial weights"})

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "mlp", "kv_heads", "head_size", "vocabulary", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name} is {value}; it has to be at least 1.")
        if self.head_size is None and self.hidden % self.heads:
            raise UserError(
                f"model.hidden is {self.hidden} and model.heads is {self.heads}: {self.hidden} / {self.heads} = "
                f"{self.hidden / self.heads:.4g} is not a whole head size. Choose heads that divide {self.hidden}, or "
                f"set model.head_size."
            )
        if self.heads % self.KvHeads.size:
            raise UserError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}: each key and value head serves "
                f"heads / kv_heads query heads, and {self.heads} / {self.kv_heads} is not a whole number."
            )
        if self.HeadSize.size % 2:
            raise UserError(f"model.head_size is {self.HeadSize.size}; rotary embeddings need an even one.")

    @property
    def Layers(self) -> Axis:
        return Axis(LAYERS, self.layers)

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden)

    @property
    def Heads(self) -> Axis:
        return Axis("heads", self.heads)

    @property
    def KvHeads(self) -> Axis:
        return Axis("kv_heads", self.kv_heads or self.heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis("head_size", self.head_size or self.hidden // self.heads)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.mlp)

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Configuration key -> (meaning, axis) of every axis that a mesh may split."""
        return {
            "model.hidden": ("the width of the residual stream", self.Embed),
            "model.heads": ("the query heads", self.Heads),
            "model.kv_heads": ("the key and value heads", self.KvHeads),
            "model.mlp": ("the width of the SwiGLU layer", self.Mlp),
        }


@dataclass(frozen=True)
class ComputeConfig:
    """How a model is computed; none of it changes what is computed but for rounding."""

    dtype: str = field(default="bfloat16", metadata={"help": "dtype of activations and gathered weights"})
    gather: str = field(
        default="per_layer", metadata={"help": "weights over data: per_layer (ZeRO-3) or per_step (kept)"}
    )
    remat: str = field(default="full", metadata={"help": "what a layer saves for its backward pass, by name"})
    unroll: int | None = field(default=None, metadata={"help": "layers unrolled in the layer scan; null: by backend"})
    attention: str = field(default="auto", metadata={"help": "attention kernel; auto: cudnn on GPU, else xla"})
    loss_block: int = field(default=1024, metadata={"help": "tokens whose logits are held at a time, a device"})

    def __post_init__(self):
        check_choice("compute.dtype", self.dtype, DTYPES)
        check_choice("compute.gather", self.gather, ("per_layer", "per_step"))
        check_choice("compute.remat", self.remat, REMAT)
        check_choice("compute.attention", self.attention, ATTENTION)
        for name in ("unroll", "loss_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"compute.{name} is {value}; it has to be at least 1.")
