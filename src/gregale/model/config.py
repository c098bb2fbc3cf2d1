"""The configuration of models: their types, sizes, layers, experts, adapters, computation and rotary scaling."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import EMBED, EXPERTS, LAYERS, ROUTER
from gregale.errors import KeyedError, UserError
from gregale.model.losses import Logits
from gregale.model.parametrisation import BASE, Parametrisation, Scaling
from gregale.settings import Fixed, Range, Settings, above, at_least, between, check_path, setting, whole

SHAPE = Fixed("the saved parameters have this shape")


Batch = dict[str, NamedArray]
"""`tokens`, `targets`, `loss_mask`, `positions` and, inside documents, `segment_ids`: [batch, position] each."""


class ModelMethods(NamedTuple):
    """The methods of a model, as in `gregale.model.llama.Llama`; None for those that it lacks.

    A model is an Equinox module of any class, whose floating-point arrays are trained. It needs `loss`.

    - `loss`: the sum of the masked losses (nats) and the sum of the mask, both float32 scalars, or `Losses`
    - `update_buffers`: the model with new `Buffer`s, from a step's sums of `Losses.statistics` and of the weights
    - `with_logits_below`: the model with smaller weights of heads, from a step's `Losses.maxima` (`optimizer.qk_clip`)
    - `logits`: for sampling and tasks; `scores` and `prefill`, with `decode` and `unstacked`, are faster forms of it
    - `window_of_all`: no method, but the window of all layers' attention
    """

    loss: Callable | None
    update_buffers: Callable | None
    with_logits_below: Callable | None
    logits: Callable | None
    scores: Callable | None
    prefill: Callable | None
    attention_logit_maxima: Callable | None
    expert_loads: Callable | None
    window_of_all: int | None

    @classmethod
    def of(cls, model: Any) -> Self:
        return cls(*(getattr(model, name, None) for name in cls._fields))


@dataclass(frozen=True)
class ModelConfig(Settings, draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`.

    - `splits_positions`: the loss is that of whole sequences if several devices share each, in `axes.position_order`
    """

    splits_positions: ClassVar[bool] = False

    # Subclasses have these as fields, whose order they keep: annotated here they would be the first.
    vocabulary = cast(int | None, None)  # tokens; None: the tokenizer's, padded
    row_multiple = cast(int, 1)  # of the rows of a table with `vocabulary`
    layers = cast(int | None, None)  # stacked layers; None: it has none that a pipeline could run
    rotary_scaling = cast(Any, None)  # for a longer context
    experts = cast(Any, None)  # in place of MLPs
    kind_numbers: ClassVar[tuple[int, ...]] = ()  # of each layer, see `gregale.model.execution`
    score_softcap: ClassVar[float | None] = None  # the limit of attention scores; None: no limit
    logit_rows = cast(int | None, None)  # first rows of the vocabulary that have logits; None: all
    is_at_hub: ClassVar[bool] = False  # it names a model of the hub, whose shape a run has in its place
    keys_of_rates: ClassVar[tuple[str, ...]] = ()  # settings of learning rates alone, which may be None

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def init(self, Vocab: Axis, key: jax.Array) -> Any:
        """Return the model with its initial weights; it is traced, so that each device makes its shards.

        - `Vocab`: the padded vocabulary
        """
        raise TypeError(f"{type(self).__name__} makes no model; choose one by its type")

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Return configuration key -> (meaning, axis) of every axis that a mesh may split, except the vocabulary."""
        return {}

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """Return the factors of rates by the model's size, see `model.parametrisation`; nothing: all are 1."""
        return ()

    @property
    def head_width(self) -> int:
        """Return the width of an attention head; 0 without attention."""
        return 0


@ModelConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceConfig(ModelConfig):
    """The shape in the config.json of a model of the hub, with random weights; a run keeps it as `type: llama`."""

    is_at_hub: ClassVar[bool] = True

    path: str = field(metadata={"help": "its folder, or its name on the hub: ORG/NAME or ORG/NAME@REVISION"})
    with_tokenizer: bool = setting(True, "its tokenizer too, unless data.tokenizer is another")

    def __post_init__(self):
        super().__post_init__()
        check_path("path", self.path)


@dataclass(frozen=True)
class Sizes(ModelConfig):
    """The settings that determine the parameter shapes of a decoder-only model."""

    layers: int = setting(
        12, "number of layers", range=whole(1, 100_000), aliases=("num_hidden_layers", "depth"), fixed=SHAPE
    )
    hidden: int = setting(
        768,
        "width of the residual stream",
        range=whole(1),
        aliases=("hidden_size", "dim", "d_model", "embed_dim", "width", "embed"),
        fixed=SHAPE,
    )
    heads: int = setting(12, "query heads", range=whole(1), aliases=("num_attention_heads",), fixed=SHAPE)
    kv_heads: int | None = setting(
        None,
        "key and value heads; null: as many as heads",
        range=whole(1),
        aliases=("num_key_value_heads", "num_query_groups"),
        fixed=SHAPE,
    )
    head_size: int | None = setting(
        None, "width of a head; null: hidden / heads", range=whole(1), aliases=("d_head", "d_kv"), fixed=SHAPE
    )
    mlp: int = setting(
        2048,
        "width of the gated layer",
        range=whole(1),
        aliases=("ffn_dim", "mlp_dim", "d_ff", "ffn_hidden_size", "mlp_size"),
        fixed=SHAPE,
    )
    vocabulary: int | None = setting(
        None,
        "rows of tables; null: the tokenizer's",
        range=whole(1),
        aliases=("vocab", "vocabulary_size", "n_vocab"),
        fixed=SHAPE,
    )
    row_multiple: int = setting(1, "rows are filled up to it, without logits", range=whole(1), fixed=SHAPE)
    tied_head: bool = setting(
        False, "the output head is the embedding table", aliases=("tied_embeddings", "weight_tying"), fixed=SHAPE
    )

    def __post_init__(self):
        super().__post_init__()
        if self.row_multiple > 1 and self.vocabulary is None:
            raise KeyedError(
                "row_multiple",
                f"is {self.row_multiple}",
                ", but vocabulary is null, which is the tokenizer's and filled up already; give the rows of a table.",
            )
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

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.mlp)

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Return configuration key -> (meaning, axis) of every axis that a mesh may split."""
        return {
            "model.hidden": ("the width of the residual stream", self.Embed),
            "model.heads": ("the query heads", self.Heads),
            "model.kv_heads": ("the key and value heads", self.KvHeads),
            "model.mlp": ("the width of the gated layer", self.Mlp),
        }


REMAT = ("none", "full", "context", "context_offload", "projections", "offload")
RULES = ("auto", "plain")
ATTENTION = ("auto", "splash", "cudnn", "xla")
MATMUL = ("dtype", "int8", "fp8")
CompilerOptions = dict[str, bool | int | float | str]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
GATHER = ("per_layer", "per_step")


@dataclass(frozen=True)
class ComputeConfig(Settings):
    """The computation of a model; it changes the results only by rounding, `matmul` by that to 8 bits."""

    dtype: str = setting(
        "bfloat16",
        "dtype of activations and gathered weights",
        choices=tuple(DTYPES),
        aliases=("precision", "mixed_precision", "torch_dtype", "bf16", "fp16", "model.dtype"),
    )
    matmul: str = setting(
        "dtype",
        "numbers of the layers' linear products",
        choices=MATMUL,
        aliases=("quantization", "quant", "quantize", "fp8"),
    )
    gather: str = setting("per_layer", "weights over data: ZeRO-3, or kept", choices=GATHER)
    remat: str = setting(
        "full",
        "what a layer saves for its backward pass",
        choices=REMAT,
        aliases=("activation_checkpointing", "checkpointing", "recompute"),
    )
    unroll: int | None = setting(None, "layers unrolled; null: by backend", range=whole(1))
    autodiff_rules: str = setting("auto", "rules of differentiation; auto: the platform's", choices=RULES)
    attention: str = setting(
        "auto",
        "attention; auto: the fastest that fits",
        choices=ATTENTION,
        aliases=("attn_implementation", "attention_backend", "attn", "model.attention"),
    )
    loss_block: int = setting(1024, "tokens whose logits are held at a time", range=whole(1))
    compiler_options: CompilerOptions = setting(dict, "XLA's own options")


MEANING = Fixed("the saved parameters were trained for this one, and would silently be another model")


def original_context_setting() -> Any:
    """Return the field of the context with which a model was trained, which each class needs for itself."""
    return setting(
        8192,
        "context length before the stretching, in tokens",
        range=whole(1),
        aliases=("original_max_position_embeddings",),
        fixed=MEANING,
    )


@dataclass(frozen=True)
class RotaryScaling(Settings, draccus.ChoiceRegistry):
    """A scaling of the rotary frequencies to a longer context than that of the model's first training."""

    factor: float = setting(8.0, "how much longer the context becomes", range=above(0), fixed=MEANING)

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama3"

    @abstractmethod
    def kept(self, frequency: np.ndarray) -> np.ndarray:
        """Return the fraction, 0 to 1, of each frequency (radians per position) that stays; `factor` divides others."""

    @property
    def score_factor(self) -> float:
        """Return the number that multiplies attention's scores."""
        return 1.0


@RotaryScaling.register_subclass("linear")
@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        return np.zeros_like(frequency)


@RotaryScaling.register_subclass("llama3")
@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's scaling: low frequencies are scaled, high ones kept, and those between interpolated."""

    low_frequency_factor: float = setting(
        1.0,
        "wavelengths above context / this are stretched",
        range=above(0),
        aliases=("low_freq_factor",),
        fixed=MEANING,
    )
    high_frequency_factor: float = setting(
        4.0, "wavelengths below context / this are kept", range=above(0), aliases=("high_freq_factor",), fixed=MEANING
    )
    original_context: int = original_context_setting()

    def __post_init__(self):
        super().__post_init__()
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise KeyedError(
                "low_frequency_factor",
                f"is {self.low_frequency_factor:g}",
                f" and high_frequency_factor is {self.high_frequency_factor:g}: the wavelengths between context / high "
                "and context / low are interpolated, so that low has to be below high.",
            )

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        turns = self.original_context * frequency / (2 * math.pi)  # in the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return np.clip((turns - low) / (high - low), 0.0, 1.0)


@RotaryScaling.register_subclass("yarn")
@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (arXiv 2309.00071): low frequencies are scaled, high ones kept, and scores are larger.

    Two channels turn `fast_turns` and `slow_turns` times in the original context. The kept fraction of those in between
    falls linearly with the channel's number; that of Llama 3.1's scaling follows the frequency.
    """

    fast_turns: float = setting(
        32.0, "channels that turn more often are kept", range=above(0), aliases=("beta_fast",), fixed=MEANING
    )
    slow_turns: float = setting(
        1.0, "channels that turn less often are stretched", range=above(0), aliases=("beta_slow",), fixed=MEANING
    )
    original_context: int = original_context_setting()
    attention_factor: float | None = setting(
        None, "of queries and of keys; null: 0.1 ln(factor) + 1", range=above(0), fixed=MEANING
    )
    whole_channels: bool = setting(True, "round both limits to whole channels", aliases=("truncate",), fixed=MEANING)

    def __post_init__(self):
        super().__post_init__()
        if self.fast_turns <= self.slow_turns:
            raise KeyedError(
                "fast_turns",
                f"is {self.fast_turns:g}",
                f" and slow_turns is {self.slow_turns:g}: channels in between are interpolated, so that fast has to be "
                "above slow.",
            )

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        # Channel i has the frequency exp(-i * ratio), so that it turns original_context * frequency / (2 pi) times.
        ratio = max(-math.log(frequency[1]), 1e-9) if len(frequency) > 1 else 1.0
        turns = self.fast_turns, self.slow_turns
        low, high = (math.log(self.original_context / (2 * math.pi * each)) / ratio for each in turns)
        low, high = (math.floor(low), math.ceil(high)) if self.whole_channels else (low, high)
        low, high = max(low, 0), min(high, 2 * len(frequency) - 1)
        return 1 - np.clip((np.arange(len(frequency)) - low) / max(high - low, 0.001), 0.0, 1.0)

    @property
    def score_factor(self) -> float:
        given = self.attention_factor
        return (1 + 0.1 * math.log(max(self.factor, 1.0)) if given is None else given) ** 2


SCORES = ("softmax", "sigmoid")
ROUTERS = ("dtype", "float32")
BALANCE, Z = "balance_loss", "router_z_loss"  # terms of the loss


@dataclass(frozen=True)
class BalanceConfig(Settings):
    """The terms that make experts take equally many tokens (docs/experts.md, "Balance")."""

    loss: float = setting(
        0.0,
        "coefficient of the balance loss",
        range=at_least(0),
        aliases=("router_aux_loss_coef", "aux_loss_alpha", "load_balance_loss_weight", "lbl_coef", "lbl_loss_weight"),
        by_topic=True,
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the mean squared logsumexp of the router's logits",
        range=at_least(0),
        aliases=("router_z_loss_coef", "rzl_coef", "moe_z_loss_coeff"),
        by_topic=True,
    )
    bias: bool = setting(
        False,
        "a bias of each expert, for the choice alone (DeepSeek V3)",
        aliases=("routed_bias", "use_expert_bias", "moe_router_enable_expert_bias"),
        fixed=SHAPE,
        by_topic=True,
    )
    bias_rate: float = setting(
        1e-3,
        "change of a bias in a step; 0: biases stay",
        range=between(0, 1),
        aliases=("routed_bias_update_rate", "moe_router_bias_update_rate"),
        by_topic=True,
    )

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the terms in the loss."""
        coefficients = {BALANCE: self.loss, Z: self.z_loss}
        return tuple(name for name, coefficient in coefficients.items() if coefficient)


@dataclass(frozen=True)
class ExpertsConfig(Settings):
    """A mixture of experts in place of an MLP: each token passes through `active` of `count` small MLPs."""

    count: int = setting(
        8,
        "experts of a layer",
        range=whole(2),
        aliases=("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts"),
        fixed=SHAPE,
        by_topic=True,
    )
    active: int = setting(
        2,
        "experts of a token",
        range=whole(1),
        aliases=("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k", "router_topk"),
        fixed=MEANING,
        by_topic=True,
    )
    width: int = setting(
        768,
        "width of an expert",
        range=whole(1),
        aliases=(
            *("moe_intermediate_size", "moe_mlp_dim", "base_moe_mlp_dim", "moe_hidden_dim", "moe_ffn_hidden_size"),
            *(f"model.experts.{name}" for name in ("hidden", "hidden_size", "hidden_dim", "mlp", "ffn_dim", "d_ff")),
        ),
        fixed=SHAPE,
        by_topic=True,
    )
    shared: int = setting(
        0,
        "width of an MLP for all tokens, beside the experts; 0: none",
        range=whole(0),
        aliases=("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        fixed=SHAPE,
        by_topic=True,
    )
    shared_gate: bool = setting(
        False, "a sigmoid of each token weighs that MLP (Qwen 2 MoE)", fixed=SHAPE, by_topic=True
    )
    renormalise: bool = setting(
        True,
        "the weights of a token's experts sum to 1",
        aliases=("norm_topk_prob", "route_norm", "norm_topk"),
        fixed=MEANING,
        by_topic=True,
    )
    score: str = setting(
        "softmax",
        "of the router's logits",
        choices=SCORES,
        aliases=("scoring_func", "score_func", "routed_score_func", "moe_router_score_function"),
        fixed=MEANING,
        by_topic=True,
    )
    scale: float = setting(
        1.0,
        "factor of the weights",
        range=above(0),
        aliases=("routed_scaling_factor", "route_scale", "moe_router_topk_scaling_factor"),
        fixed=MEANING,
        by_topic=True,
    )
    groups: int = setting(
        1,
        "groups of experts, of which a token takes the best",
        range=whole(1),
        aliases=("n_group", "n_routing_groups", "num_expert_groups"),
        fixed=MEANING,
        by_topic=True,
    )
    active_groups: int = setting(
        1,
        "groups of a token",
        range=whole(1),
        aliases=("topk_group", "topk_routing_group"),
        fixed=MEANING,
        by_topic=True,
    )
    router: str = setting(
        "dtype",
        "dtype of the product that gives the router's logits",
        choices=ROUTERS,
        aliases=("router_dtype", "moe_router_dtype", "float32_gate_logits"),
        by_topic=True,
    )
    balance: BalanceConfig = field(
        default_factory=BalanceConfig, metadata={"help": "terms for equal numbers of tokens"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.count % self.groups:
            raise KeyedError(
                "groups",
                f"is {self.groups}",
                f" and count is {self.count}: groups have equally many experts, and {self.count} / {self.groups} is "
                "not a whole number.",
            )
        if self.active_groups > self.groups:
            raise KeyedError("active_groups", f"is {self.active_groups}", f", and there are {self.groups} groups.")
        if self.active > (within := self.count // self.groups * self.active_groups):
            raise KeyedError(
                "active", f"is {self.active}", f", and a token can choose among {within} experts: raise count."
            )
        if self.shared_gate and not self.shared:
            raise KeyedError("shared_gate", "is true", ", but shared is 0, so there is nothing that it weighs.")

    @property
    def Experts(self) -> Axis:
        return Axis(EXPERTS, self.count)

    @property
    def Router(self) -> Axis:
        return Axis(ROUTER, self.count)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.width)


NORMS = ("before", "after", "around")
ACTIVATIONS = ("silu", "gelu")
QK_NORM_OVER = ("head", "heads")


class LayerKind(NamedTuple):
    """The differences between the layers of a stack."""

    window: int | None  # the number of tokens that a token sees, itself included; None: all earlier tokens
    rotary_base: float
    rotary_scaling: RotaryScaling | None

    @property
    def score_factor(self) -> float:
        """Return the factor of attention's scores."""
        return 1.0 if self.rotary_scaling is None else self.rotary_scaling.score_factor


@dataclass(frozen=True)
class DecoderConfig(Sizes):
    """The settings of the Llama family's layers; `gregale.model.llama` has the types that make models of them."""

    splits_positions: ClassVar[bool] = True
    keys_of_rates: ClassVar[tuple[str, ...]] = ("parametrisation",)

    # Only `GptOssConfig` has others.
    sinks: ClassVar[bool] = False  # attention has sinks, see `kernels.sinks`
    biased: ClassVar[bool] = False  # attention's output, the router and the experts have biases
    # Only `GemmaConfig` has settings for these.
    activation: ClassVar[str] = "silu"
    norm_offset: ClassVar[float] = 0.0
    score_width: ClassVar[float | None] = None
    logit_softcap: ClassVar[float | None] = None
    scaled_embedding: ClassVar[bool] = False
    window_rotary_base: ClassVar[float | None] = None

    experts: ExpertsConfig | None = field(
        default=None, metadata={"help": "experts in place of MLPs; null: none", "fixed": SHAPE, "by_topic": True}
    )
    dense_layers: int = setting(
        0,
        "first layers, with an MLP in place of experts",
        range=whole(0),
        aliases=("first_num_dense_layers", "first_k_dense_replace", "n_dense_layers", "num_dense_layers"),
        fixed=SHAPE,
        by_topic=True,
    )
    norms: str = setting("before", "normalise what a layer takes, gives, or both", choices=NORMS, fixed=MEANING)
    qk_norm: bool = setting(False, "RMSNorm on queries and keys (Qwen 3)", aliases=("qk_layernorm",), fixed=SHAPE)
    qk_norm_over: str = setting("head", "one head's values, or all heads' (OLMo 2)", choices=QK_NORM_OVER, fixed=SHAPE)
    attention_bias: bool = setting(False, "biases on query, key and value (Qwen 2)", aliases=("qkv_bias",), fixed=SHAPE)
    sliding_window: int | None = setting(
        None,
        "tokens that a token sees at most (Mistral)",
        range=whole(1),
        aliases=("window_size", "attention_window", "window"),
        fixed=MEANING,
    )
    full_layers: tuple[int, ...] = setting(
        (), "layers, from 0, that see all tokens", range=whole(0), unique=True, fixed=MEANING
    )
    norm_epsilon: float = setting(
        1e-5,
        "added to the mean square in RMSNorm",
        range=Range(0, 1, above=True),
        aliases=("rms_norm_eps", "rms_norm_epsilon"),
        fixed=MEANING,
    )
    rotary_base: float = setting(
        10000.0, "base of the rotary wavelengths", range=at_least(1), aliases=("rotary_theta", "theta"), fixed=MEANING
    )
    rotary_scaling: RotaryScaling | None = setting(
        None, "for a longer context; null: none", aliases=("rope_scaling",), fixed=MEANING
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the squared logsumexp of the logits (PaLM)",
        range=at_least(0),
        aliases=("z_loss_multiplier", "z_loss_coef"),
        by_topic=True,
    )
    init_scale: float = setting(
        0.02, "standard deviation of the initial weights", range=at_least(0), aliases=("initializer_range", "init_std")
    )
    parametrisation: Parametrisation | None = setting(
        None, "factors of initial weights and rates by the model's size; null: none", fixed=BASE, by_topic=True
    )

    def __post_init__(self):
        super().__post_init__()
        if beyond := [layer for layer in self.full_layers if layer >= self.layers]:
            raise KeyedError(
                "full_layers", f"names {beyond[0]}", f", and there are {self.layers} layers: 0 to {self.layers - 1}."
            )
        if self.dense_layers and (self.experts is None or self.dense_layers >= self.layers):
            reason = "there are no experts" if self.experts is None else f"there are {self.layers} layers"
            raise KeyedError("dense_layers", f"is {self.dense_layers}", f", and {reason}: no layer would have experts.")
        for name, used in (("full_layers", self.full_layers), ("window_rotary_base", self.window_rotary_base)):
            if used and self.sliding_window is None:
                raise KeyedError(name, f"is {used}", ", but there is no sliding_window that layers could have or lack.")

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        return () if self.parametrisation is None else self.parametrisation.scalings(self)

    @property
    def logits(self) -> Logits:
        return Logits(self.logit_softcap, self.vocabulary if self.row_multiple > 1 else None, self.z_loss)

    @property
    def logit_rows(self) -> int | None:
        return self.logits.rows

    @property
    def window_of_all(self) -> int | None:
        """Return the window of all layers; None if some layer has none."""
        return None if self.full_layers else self.sliding_window

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(map(self._kind, range(self.layers))))

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """Return the kind of each layer, as an index in `kinds`."""
        kinds = self.kinds
        return tuple(kinds.index(self._kind(layer)) for layer in range(self.layers))

    @property
    def structure_numbers(self) -> tuple[int, ...]:
        """Return the structure of each layer, see `structure`."""
        return (
            tuple(int(layer >= self.dense_layers) for layer in range(self.layers))
            if self.dense_layers
            else (0,) * self.layers
        )

    def structure(self, number: int) -> "DecoderConfig":
        """Return the sizes of the layers of a structure, as a configuration; a subclass may have several."""
        if not self.dense_layers:
            return self
        return replace(self, dense_layers=0, experts=self.experts if number else None)

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        found = super().split_axes()
        if self.experts is None:
            return found
        if not self.dense_layers:
            del found["model.mlp"]
        found["model.experts.count"] = ("the number of experts", self.experts.Experts)
        found["model.experts.width"] = ("the width of an expert", self.experts.Mlp)
        if self.experts.shared:
            found["model.experts.shared"] = ("the width of the MLP of all tokens", Axis("mlp", self.experts.shared))
        return found

    def _kind(self, layer: int) -> LayerKind:
        if self.sliding_window is None or layer in self.full_layers:
            return LayerKind(None, self.rotary_base, self.rotary_scaling)
        if self.window_rotary_base is None:
            return LayerKind(self.sliding_window, self.rotary_base, self.rotary_scaling)
        return LayerKind(self.sliding_window, self.window_rotary_base, None)

    def normalised_together(self, Heads: Axis) -> tuple[Axis, ...] | None:
        """Return the axes of the queries' or keys' norm; None if they are not normalised."""
        if not self.qk_norm:
            return None
        return (Heads, self.HeadSize) if self.qk_norm_over == "heads" else (self.HeadSize,)


MLP_TARGETS = ("gate", "up", "down")
EXPERT_TARGETS = {f"expert_{name}": name for name in MLP_TARGETS}  # the names of matrices of experts in their layer
TARGETS = ("query", "key", "value", "out", *MLP_TARGETS)  # of linear layers
SCALINGS = ("standard", "rank_stabilised")
BASES = ("dtype", "int8", "nf4")


@dataclass(frozen=True)
class AdapterConfig(Settings, draccus.ChoiceRegistry):
    """The choice of an adapter by `type`."""

    # Subclasses have these as fields, see `ModelConfig`.
    rank = cast(int, 0)
    dropout = cast(float, 0.0)
    targets = cast(tuple[str, ...], ())
    base = cast(str, "dtype")
    start_from = cast(str | None, None)
    scale = cast(float, 1.0)  # of what adapters add
    expert_targets = cast(list[str], [])  # names of adapted matrices of experts, in their layer

    def peft(self) -> dict[str, Any]:
        """Return the keys of an adapter_config.json that say how the adapters compute."""
        raise TypeError(f"{type(self).__name__} is no adapter of PEFT; choose one by its type")

    @classmethod
    def default_choice_name(cls) -> str:
        return "lora"


@AdapterConfig.register_subclass("lora")
@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """LoRA (arXiv 2106.09685): y = x W + scale * (x A) B, where W is frozen, A is drawn and B is zero at the start."""

    rank: int = setting(16, "width of x A", range=whole(1), aliases=("r",), fixed=SHAPE, by_topic=True)
    alpha: float = setting(32.0, "scale times rank, or its root", range=above(0), fixed=MEANING, by_topic=True)
    scaling: str = setting(
        "standard",
        "scale is alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732)",
        choices=SCALINGS,
        aliases=("use_rslora",),
        fixed=MEANING,
        by_topic=True,
    )
    dropout: float = setting(0.0, "share of x that A does not see", range=Range(0, 1, below=True), by_topic=True)
    targets: tuple[str, ...] = setting(
        ("query", "value"),
        "projections with an adapter",
        choices=(*TARGETS, *EXPERT_TARGETS),
        unique=True,
        aliases=("target_modules",),
        elsewhere={
            **{f"{name}_proj": name for name in ("gate", "up", "down")},
            "q_proj": "query",
            "k_proj": "key",
            "v_proj": "value",
            "o_proj": "out",
        },
        fixed=SHAPE,
        by_topic=True,
    )
    base: str = setting(
        "dtype",
        "frozen projections: in compute.dtype, or in blocks of 64 values in 8 or 4 bits (QLoRA, arXiv 2305.14314)",
        choices=BASES,
        aliases=("bnb_4bit_quant_type",),
        fixed=MEANING,
        by_topic=True,
    )
    start_from: str | None = setting(
        None,
        "run with adapters, or folder of PEFT, whose adapters to continue; null: new ones",
        fixed=Fixed("it was read before the first step"),
        by_topic=True,
    )

    @property
    def expert_targets(self) -> list[str]:
        return [name for target, name in EXPERT_TARGETS.items() if target in self.targets]

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank if self.scaling == "standard" else self.rank**0.5)

    def peft(self) -> dict[str, Any]:
        return {
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha % 1 == 0 else self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.scaling == "rank_stabilised",
        }
