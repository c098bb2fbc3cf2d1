"""Model configurations: the shape of a model, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import draccus
import jax.numpy as jnp
from haliax import Axis

from gregale.axes.layout import EMBED, LAYERS
from gregale.errors import UserError
from gregale.model.scaling import MEANING, RotaryScaling
from gregale.settings import Fixed, Settings, above, at_least, whole

REMAT = ("none", "full", "context", "context_offload", "projections", "offload")
RULES = ("auto", "plain")
ATTENTION = ("auto", "splash", "cudnn", "xla")
CompilerOptions = dict[str, bool | int | float | str]
NORMS = ("before", "after")
QK_NORM_OVER = ("head", "heads")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


SHAPE = Fixed("the saved parameters have this shape")


@dataclass(frozen=True)
class ModelConfig(Settings, draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Configuration key -> (meaning, axis) of every axis that a mesh may split, but for the vocabulary."""
        return {}

    @property
    def head_width(self) -> int:
        """Width of an attention head; 0: there is no attention."""
        return 0


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3 (dense) and OLMo 2 are settings of these fields."""

    layers: int = field(
        default=12,
        metadata={
            "help": "number of layers",
            "range": whole(1, 100_000),
            "aliases": ("n_layers", "num_layers", "n_layer", "num_hidden_layers", "depth"),
            "fixed": SHAPE,
        },
    )
    hidden: int = field(
        default=768,
        metadata={
            "help": "width of the residual stream",
            "range": whole(1),
            "aliases": ("hidden_size", "dim", "d_model", "n_embd", "hidden_dim", "embed_dim", "width", "embed"),
            "fixed": SHAPE,
        },
    )
    heads: int = field(
        default=12,
        metadata={
            "help": "query heads",
            "range": whole(1),
            "aliases": ("num_heads", "n_heads", "n_head", "num_attention_heads"),
            "fixed": SHAPE,
        },
    )
    kv_heads: int | None = field(
        default=None,
        metadata={
            "help": "key and value heads; null: as many as heads",
            "range": whole(1),
            "aliases": ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
            "fixed": SHAPE,
        },
    )
    head_size: int | None = field(
        default=None,
        metadata={
            "help": "width of a head; null: hidden / heads",
            "range": whole(1),
            "aliases": ("head_dim", "d_head", "d_kv"),
            "fixed": SHAPE,
        },
    )
    mlp: int = field(
        default=2048,
        metadata={
            "help": "width of the SwiGLU layer",
            "range": whole(1),
            "aliases": ("intermediate_size", "ffn_dim", "mlp_dim", "d_ff", "ffn_hidden_size", "mlp_size"),
            "fixed": SHAPE,
        },
    )
    vocabulary: int | None = field(
        default=None,
        metadata={
            "help": "embedding rows; null: the tokenizer's, padded",
            "range": whole(1),
            "aliases": ("vocab_size", "vocab", "vocabulary_size", "n_vocab"),
            "fixed": SHAPE,
        },
    )
    tied_head: bool = field(
        default=False,
        metadata={
            "help": "the output head is the embedding table",
            "aliases": ("tie_word_embeddings", "tie_embeddings", "tied_embeddings", "weight_tying"),
            "fixed": SHAPE,
        },
    )
    norms: str = field(
        default="before",
        metadata={
            "help": "normalise what a layer takes, or gives (OLMo 2)",
            "choices": NORMS,
            "fixed": MEANING,
        },
    )
    qk_norm: bool = field(default=False, metadata={"help": "RMSNorm on queries and keys (Qwen 3)", "fixed": SHAPE})
    qk_norm_over: str = field(
        default="head",
        metadata={
            "help": "one head's values, or all heads' (OLMo 2)",
            "choices": QK_NORM_OVER,
            "fixed": SHAPE,
        },
    )
    attention_bias: bool = field(
        default=False,
        metadata={"help": "biases on query, key and value (Qwen 2)", "aliases": ("qkv_bias",), "fixed": SHAPE},
    )
    sliding_window: int | None = field(
        default=None,
        metadata={
            "help": "tokens that a token sees at most (Mistral)",
            "range": whole(1),
            "aliases": ("window_size", "attention_window", "window"),
            "fixed": MEANING,
        },
    )
    norm_epsilon: float = field(
        default=1e-5,
        metadata={
            "help": "added to the mean square in RMSNorm",
            "range": above(0),
            "aliases": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "rms_norm_epsilon"),
            "fixed": MEANING,
        },
    )
    rotary_base: float = field(
        default=10000.0,
        metadata={
            "help": "base of the rotary wavelengths",
            "range": at_least(1),
            "aliases": ("rope_theta", "rope_base", "rotary_theta", "theta"),
            "fixed": MEANING,
        },
    )
    rotary_scaling: RotaryScaling | None = field(
        default=None,
        metadata={"help": "for a longer context; null: none", "aliases": ("rope_scaling",), "fixed": MEANING},
    )
    init_scale: float = field(
        default=0.02,
        metadata={
            "help": "standard deviation of the initial weights",
            "range": at_least(0),
            "aliases": ("initializer_range", "init_std"),
        },
    )

    def __post_init__(self):
        super().__post_init__()
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
    def head_width(self) -> int:
        return self.HeadSize.size

    def normalised_together(self, Heads: Axis) -> tuple[Axis, ...] | None:
        """The axes of the queries' or keys' norm, of so many heads; None: they are not normalised."""
        if not self.qk_norm:
            return None
        return (Heads, self.HeadSize) if self.qk_norm_over == "heads" else (self.HeadSize,)

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


GATHER = ("per_layer", "per_step")


@dataclass(frozen=True)
class ComputeConfig(Settings):
    """How a model is computed; none of it changes what is computed but for rounding."""

    dtype: str = field(
        default="bfloat16",
        metadata={
            "help": "dtype of activations and gathered weights",
            "choices": tuple(DTYPES),
            "aliases": ("precision", "mixed_precision", "torch_dtype", "bf16"),
        },
    )
    gather: str = field(
        default="per_layer",
        metadata={"help": "weights over data: per_layer (ZeRO-3) or per_step (kept)", "choices": GATHER},
    )
    remat: str = field(
        default="full",
        metadata={
            "help": "what a layer saves for its backward pass",
            "choices": REMAT,
            "aliases": ("gradient_checkpointing", "activation_checkpointing", "checkpointing", "recompute"),
        },
    )
    unroll: int | None = field(
        default=None, metadata={"help": "layers unrolled in the layer scan; null: by backend", "range": whole(1)}
    )
    rules: str = field(
        default="auto",
        metadata={"help": "rules of differentiation; auto: the platform's own if it has any", "choices": RULES},
    )
    attention: str = field(
        default="auto",
        metadata={
            "help": "attention; auto: the fastest that fits",
            "choices": ATTENTION,
            "aliases": ("attn_implementation", "flash_attention", "attention_backend"),
        },
    )
    loss_block: int = field(
        default=1024, metadata={"help": "tokens whose logits are held at a time, a device", "range": whole(1)}
    )
    compiler_options: CompilerOptions = field(
        default_factory=dict,
        metadata={"help": "XLA's own options"},
    )
