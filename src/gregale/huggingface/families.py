"""Families of models: the keys of their configurations, and the names and forms of their tensors.

register_family(Family("mine", "MineForCausalLM", {**PROJECTIONS, **NORMS_BEFORE}))
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, get_args, get_origin

import jax
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import EXPERTS, is_layers, is_named
from gregale.axes.parameters import buffers_of, layer_numbers, layer_order, layers_axis
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.model.config import BalanceConfig, ExpertsConfig
from gregale.model.kernels.operations import CLIP_LIMIT, CLIP_SLOPE
from gregale.model.llama import GemmaConfig, GptOssConfig, LlamaConfig
from gregale.settings import Range, shortened, whole
from gregale.settings.decoding import is_union, type_name, types_of

MLP_ONLY, FIRST_DENSE = "mlp_only_layers", "first_k_dense_replace"
SPARSE_STEP, MLP_TYPES = "decoder_sparse_step", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
SIZES = ("count", "active", "width", "shared")
LOSS, BIAS = "balance.loss", "balance.bias"


@dataclass(frozen=True)
class TypedJson:
    """An object of a JSON file.

    - `source`: its path and, of an object in another, its key
    - `defaults`: values of keys that it lacks, or that are null though values of their type are not
    """

    content: Mapping[str, Any]
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read(self, key: str, kind: Any, default: Any = ..., valid: Range | None = None) -> Any:
        """Return a key's value as a field of type `kind` has it; without any default the key has to be there."""
        value, default = self.content.get(key), self.defaults.get(key, default)
        if default is not ... and (key not in self.content or (value is None and _typed(None, kind) is ...)):
            return default
        found = _typed(value, kind)
        if found is ... or (valid and found is not None and found not in valid):
            there = f"is {shortened(repr(value))}" if key in self.content else "is missing"
            wanted = f"{type_name(kind)}{f', {valid.words(largest=True)}' if valid else ''}"
            raise self.error(f"{key} {there}; it has to be of type {wanted}.")
        return found

    def below(self, key: str) -> "TypedJson":
        """Return the object at a key; an empty one if it is absent or null."""
        return TypedJson(self.read(key, dict, {}), f"{self.source}, {key}")

    def error(self, text: str) -> UserError:
        return UserError(f"{self.source}: {text}")


def _typed(value: Any, kind: Any) -> Any:
    """Return a value as a type has it; an ellipsis if it is of another type.

    A whole number may be written as a float, and a float as a whole number.
    """
    if is_union(kind):
        return next((found for each in get_args(kind) if (found := _typed(value, each)) is not ...), ...)
    if get_origin(kind) is list and isinstance(value, list):
        items = [_typed(item, get_args(kind)[0]) for item in value]
        return ... if ... in items else items
    if kind is float and type(value) in (int, float):
        return float(value) if abs(value) < 2**1023 else ...  # neither infinity nor NaN
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is kind else ...


@dataclass(frozen=True)
class FamilyExperts:
    """The experts of a family's models.

    - `keys`: key of config.json -> field of `model.experts`
    - `same`: fields with the same value in all its models
    - `dense`: the key of the layers with an MLP; None: no layer has one
    - `shared_in_widths`: whether the key of `shared` counts widths of an expert
    """

    keys: Mapping[str, str]
    same: Mapping[str, Any] = field(default_factory=dict)
    dense: str | None = None
    shared_in_widths: bool = False

    @property
    def sizes(self) -> list[str]:
        """Return the keys that config.json needs."""
        return [key for key, ours in self.keys.items() if ours in SIZES]

    def read(self, given: TypedJson) -> dict[str, Any]:
        """Return the fields `experts` and `dense_layers` of a configuration; `given`: the keys of config.json."""
        kinds = types_of(ExpertsConfig) | {LOSS: float}
        fields = {**self.same, **{ours: given.read(key, kinds[ours]) for key, ours in self.keys.items()}}
        balance = BalanceConfig(loss=fields.pop(LOSS, 0.0), bias=fields.pop(BIAS, False))
        if self.shared_in_widths:
            fields["shared"] *= fields["width"]
        return {"experts": ExpertsConfig(**fields, balance=balance), "dense_layers": self._dense_layers(given)}

    def _dense_layers(self, given: TypedJson) -> int:
        layers = given.read("num_hidden_layers", int)
        if self.dense == MLP_TYPES:
            kinds = given.read(MLP_TYPES, list[str], None) or [DENSE, *[SPARSE] * (layers - 1)]
            if len(kinds) != layers or not set(kinds) <= {DENSE, SPARSE}:
                raise given.error(f"{MLP_TYPES} needs {DENSE} or {SPARSE} for each of the {layers} layers.")
            rule, dense = MLP_TYPES, [layer for layer, kind in enumerate(kinds) if kind == DENSE]
        elif self.dense == MLP_ONLY:
            step, only = given.read(SPARSE_STEP, int, 1, whole(1)), given.read(MLP_ONLY, list[int], [])
            rule, named = f"{SPARSE_STEP} {step} and {MLP_ONLY} {only}", set(only)
            dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
        else:
            return 0 if self.dense is None else given.read(self.dense, int, 0, whole(0))
        if dense != [*range(len(dense))]:
            raise given.error(
                f"by {rule}, the layers without experts are {listed(list(map(str, dense)))}; Gregale computes models "
                "in which they are the first ones."
            )
        return len(dense)

    def written(self, config: LlamaConfig) -> dict[str, Any]:
        """Return the keys of a model's experts in config.json; a size of `shared` that it cannot have is rounded up."""
        experts = config.experts
        assert experts is not None
        values = {**vars(experts), LOSS: experts.balance.loss, BIAS: experts.balance.bias}
        values["shared"] = max(1, -(-experts.shared // (experts.width if self.shared_in_widths else 1)))
        found = {key: values[ours] for key, ours in self.keys.items()}
        dense = config.dense_layers
        if self.dense == MLP_ONLY:
            return {**found, SPARSE_STEP: 1, MLP_ONLY: [*range(dense)]}
        if self.dense == MLP_TYPES:
            return {**found, MLP_TYPES: [DENSE] * dense + [SPARSE] * (config.layers - dense)}
        return found if self.dense is None else {**found, self.dense: dense}


LAYER = "model.layers.{layer}."

# Hub name -> (parameter, or two in turn in the last dimension; axes of the hub's tensor; one dimension flattens those
# between two commas).
Names = Mapping[str, tuple[str, str]]

OUTSIDE: Names = {
    "model.embed_tokens.weight": ("embedding", "vocab, embed"),
    "model.norm.weight": ("norm.weight", "embed"),
    "lm_head.weight": ("head", "vocab, embed"),
}
PROJECTIONS: Names = {
    "self_attn.q_proj.weight": ("attention.query.weight", "heads head_size, embed"),
    "self_attn.k_proj.weight": ("attention.key.weight", "kv_heads head_size, embed"),
    "self_attn.v_proj.weight": ("attention.value.weight", "kv_heads head_size, embed"),
    "self_attn.q_proj.bias": ("attention.query.bias", "heads head_size"),
    "self_attn.k_proj.bias": ("attention.key.bias", "kv_heads head_size"),
    "self_attn.v_proj.bias": ("attention.value.bias", "kv_heads head_size"),
    "self_attn.o_proj.weight": ("attention.out.weight", "embed, heads head_size"),
    "mlp.gate_proj.weight": ("mlp.gate.weight", "mlp, embed"),
    "mlp.up_proj.weight": ("mlp.up.weight", "mlp, embed"),
    "mlp.down_proj.weight": ("mlp.down.weight", "embed, mlp"),
}
NORMS_BEFORE: Names = {
    "input_layernorm.weight": ("attention_norm.weight", "embed"),
    "post_attention_layernorm.weight": ("mlp_norm.weight", "embed"),
}
NORMS_AFTER: Names = {
    "post_attention_layernorm.weight": ("attention_norm.weight", "embed"),
    "post_feedforward_layernorm.weight": ("mlp_norm.weight", "embed"),
}
NORMS_AROUND: Names = {
    "input_layernorm.weight": ("attention_norm.weight", "embed"),
    "post_attention_layernorm.weight": ("attention_out_norm.weight", "embed"),
    "pre_feedforward_layernorm.weight": ("mlp_norm.weight", "embed"),
    "post_feedforward_layernorm.weight": ("mlp_out_norm.weight", "embed"),
}
NORMS_OF_A_HEAD: Names = {
    "self_attn.q_norm.weight": ("attention.query_norm.weight", "head_size"),
    "self_attn.k_norm.weight": ("attention.key_norm.weight", "head_size"),
}
NORMS_OF_ALL_HEADS: Names = {
    "self_attn.q_norm.weight": ("attention.query_norm.weight", "heads head_size"),
    "self_attn.k_norm.weight": ("attention.key_norm.weight", "kv_heads head_size"),
}
MATRICES_OF_EXPERTS: Names = {
    "mlp.experts.{expert}.gate_proj.weight": ("mlp.gate", "mlp, embed"),
    "mlp.experts.{expert}.up_proj.weight": ("mlp.up", "mlp, embed"),
    "mlp.experts.{expert}.down_proj.weight": ("mlp.down", "embed, mlp"),
}
EXPERT_NAMES: Names = {"mlp.gate.weight": ("mlp.router", "router, embed"), **MATRICES_OF_EXPERTS}
EXPERTS_OF_MIXTRAL: Names = {
    "block_sparse_moe.gate.weight": ("mlp.router", "router, embed"),
    "block_sparse_moe.experts.{expert}.w1.weight": ("mlp.gate", "mlp, embed"),
    "block_sparse_moe.experts.{expert}.w3.weight": ("mlp.up", "mlp, embed"),
    "block_sparse_moe.experts.{expert}.w2.weight": ("mlp.down", "embed, mlp"),
}
SHARED: Names = {
    "gate_proj.weight": ("mlp.shared.gate.weight", "mlp, embed"),
    "up_proj.weight": ("mlp.shared.up.weight", "mlp, embed"),
    "down_proj.weight": ("mlp.shared.down.weight", "embed, mlp"),
}
SHARED_OF_QWEN: Names = {
    **{f"mlp.shared_expert.{hub}": names for hub, names in SHARED.items()},
    "mlp.shared_expert_gate.weight": ("mlp.shared_gate", "shared_gate, embed"),
}
SHARED_OF_DOTS: Names = {f"mlp.shared_experts.{hub}": names for hub, names in SHARED.items()}
OF_GPT_OSS: Names = {
    "self_attn.o_proj.bias": ("attention.out.bias", "embed"),
    "self_attn.sinks": ("attention.sinks", "heads"),
    "mlp.router.weight": ("mlp.router", "router, embed"),
    "mlp.router.bias": ("mlp.router_bias", "router"),
    "mlp.experts.gate_up_proj": ("mlp.gate mlp.up", "experts, embed, mlp"),
    "mlp.experts.gate_up_proj_bias": ("mlp.gate_bias mlp.up_bias", "experts, mlp"),
    "mlp.experts.down_proj": ("mlp.down", "experts, mlp, embed"),
    "mlp.experts.down_proj_bias": ("mlp.down_bias", "experts, embed"),
}
BIAS_OF_DOTS: Names = {"mlp.gate.e_score_correction_bias": ("mlp.bias.value", "router")}
OF_HUNYUAN: Names = {
    "mlp.router.gate.weight": ("mlp.router", "router, embed"),
    "mlp.expert_bias": ("mlp.bias.value", "router"),
    **MATRICES_OF_EXPERTS,
    **{f"mlp.shared_mlp.{hub}": names for hub, names in SHARED.items()},
}


@dataclass(frozen=True)
class Family:
    """Models with the same block and the same tensor names; `register_family` adds one.

    The key `window` of config.json enables a sliding window: `sliding_window` itself, or `use_sliding_window`.
    """

    model_type: str  # value in config.json
    architecture: str  # class in transformers
    layer: Names  # names of a layer's tensors, below `LAYER`
    config: type[LlamaConfig] = LlamaConfig  # configuration class of its models
    block: Mapping[str, Any] = field(default_factory=dict)  # fields with the same value in all its models
    window: str | None = None  # None: no windows
    first_full: int | None = None  # default of `max_window_layers`, first layers without a window; None: no such key
    full_every: int | None = None  # without `layer_types`, each n-th layer sees all tokens; 0: none; None: no such rule
    full_at: int = -1  # the number of one of these layers; -1: the last of the first n
    keys: Mapping[str, str] = field(default_factory=dict)  # keys of config.json that not all families have
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other names of keys, which transformers may write
    legacy: Mapping[str, Any] = field(default_factory=dict)  # old values of the keys of `only`, with the same meaning
    ignored: tuple[str, ...] = ()  # keys of config.json that transformers reads but does not use: null
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json may omit
    any_heads: bool = True  # whether transformers accepts a `hidden_size` that the number of heads does not divide
    any_head_size: bool = True  # whether transformers accepts one that is not the width of all heads
    derives_layer_types: bool = True  # whether all versions of transformers derive the same `layer_types`
    experts: FamilyExperts | None = None
    rotary: Mapping[str, Any] = field(default_factory=dict)  # `rope_parameters` of a config.json without any
    rotary_kinds: bool = False  # whether `rope_parameters` are by kinds of layers
    packing: str | None = None  # quantisation that an import decodes
    part_of: tuple[str, ...] = ()  # types of models of several parts, whose `text_config` is one of this family
    more_layers: bool = False  # whether files have layers after the last one, which transformers leaves out

    @property
    def has_layer_types(self) -> bool:
        return self.first_full is not None or self.full_every is not None

    def names(self) -> dict[str, tuple[str, str]]:
        """Return all names; those of layers have `{layer}` in the name, and `blocks.` before the parameter."""
        own = {hub: f"blocks.{ours.replace(' ', ' blocks.')}" for hub, (ours, _) in self.layer.items()}
        return {**OUTSIDE, **{LAYER + hub: (own[hub], axes) for hub, (_, axes) in self.layer.items()}}


SCORE_SOFTCAP, LOCAL_BASE = "attn_logit_softcapping", "rope_local_base_freq"
SLIDING, USED = "sliding_window", "use_sliding_window"
LLAMA = {**PROJECTIONS, **NORMS_BEFORE}
OLMO = {**PROJECTIONS, **NORMS_AFTER, **NORMS_OF_ALL_HEADS}
OLMO_BLOCK = {"norms": "after", "qk_norm": True, "qk_norm_over": "heads"}
GEMMA_BLOCK = {"activation": "gelu", "norms": "around", "norm_offset": 1.0, "scaled_embedding": True}
GEMMA_KEYS = {"query_pre_attn_scalar": "score_width", "final_logit_softcapping": "logit_softcap"}
GELU = "gelu_pytorch_tanh"
GEMMA_ONLY = {"hidden_activation": GELU, "use_bidirectional_attention": False}
GEMMA_DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256} | {
    "query_pre_attn_scalar": 256, SLIDING: 4096,
}  # fmt: skip
LLAMA_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
ACTIVE = {"num_experts_per_tok": "active"}
ACTIVE_AND_LOSS = {**ACTIVE, "router_aux_loss_coef": LOSS}
MIXTRAL_EXPERTS = {"num_local_experts": "count", **ACTIVE_AND_LOSS, "intermediate_size": "width"}
QWEN_EXPERTS = {
    "num_experts": "count", "moe_intermediate_size": "width", "norm_topk_prob": "renormalise", **ACTIVE_AND_LOSS,
}  # fmt: skip
QWEN_DEFAULTS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001}
OLMO_EXPERTS = {
    "num_experts": "count", "intermediate_size": "width", "norm_topk_prob": "renormalise", **ACTIVE_AND_LOSS,
}  # fmt: skip
DEEPSEEK_EXPERTS = {
    "n_routed_experts": "count", "moe_intermediate_size": "width", "n_shared_experts": "shared", **ACTIVE,
    "norm_topk_prob": "renormalise", "routed_scaling_factor": "scale", "n_group": "groups",
    "topk_group": "active_groups",
}  # fmt: skip
DEEPSEEK_SAME = {"score": "sigmoid", "router": "float32", BIAS: True}
DEEPSEEK_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
HUNYUAN_EXPERTS = {
    "num_experts": "count", "moe_intermediate_size": "width", "num_shared_experts": "shared", **ACTIVE,
    "router_scaling_factor": "scale",
}  # fmt: skip

FAMILY_TABLE = (
    Family("llama", "LlamaForCausalLM", LLAMA, any_heads=False),
    Family("mistral", "MistralForCausalLM", LLAMA, window=SLIDING,
           defaults={"num_key_value_heads": 8, SLIDING: 4096}),
    Family("qwen2", "Qwen2ForCausalLM", LLAMA, block={"attention_bias": True}, window=USED, first_full=28),
    Family("qwen3", "Qwen3ForCausalLM", {**LLAMA, **NORMS_OF_A_HEAD}, block={"qk_norm": True}, window=USED,
           first_full=28, defaults={"head_dim": 128}),
    Family("olmo2", "Olmo2ForCausalLM", OLMO, block=OLMO_BLOCK, defaults={"rms_norm_eps": 1e-5}),
    Family("gemma2", "Gemma2ForCausalLM", {**PROJECTIONS, **NORMS_AROUND}, config=GemmaConfig, block=GEMMA_BLOCK,
           window=SLIDING, full_every=2, keys={**GEMMA_KEYS, SCORE_SOFTCAP: "score_softcap"}, only=GEMMA_ONLY,
           defaults={**GEMMA_DEFAULTS, SCORE_SOFTCAP: 50.0, "final_logit_softcapping": 30.0}, any_heads=False),
    Family("gemma3_text", "Gemma3ForCausalLM", {**PROJECTIONS, **NORMS_AROUND, **NORMS_OF_A_HEAD}, config=GemmaConfig,
           block={**GEMMA_BLOCK, "qk_norm": True}, window=SLIDING, full_every=6,
           keys={**GEMMA_KEYS, LOCAL_BASE: "window_rotary_base"}, only=GEMMA_ONLY, ignored=(SCORE_SOFTCAP,),
           # As part of a model, published files leave sizes out.
           defaults={**GEMMA_DEFAULTS, "rope_theta": 1e6, LOCAL_BASE: 1e4, "num_hidden_layers": 26, "hidden_size": 2304,
                     "num_attention_heads": 8, "intermediate_size": 9216, "vocab_size": 262208},
           any_heads=False, rotary_kinds=True, part_of=("gemma3",)),
    Family("mixtral", "MixtralForCausalLM", {**LLAMA, **EXPERTS_OF_MIXTRAL}, window=SLIDING,
           defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.001},
           experts=FamilyExperts(MIXTRAL_EXPERTS)),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", {**LLAMA, **EXPERT_NAMES, **NORMS_OF_A_HEAD}, block={"qk_norm": True},
           window=USED, synonyms={"num_local_experts": "num_experts"},
           defaults={"num_key_value_heads": 4, **QWEN_DEFAULTS},
           experts=FamilyExperts(QWEN_EXPERTS, dense=MLP_ONLY)),
    Family("olmoe", "OlmoeForCausalLM", {**LLAMA, **EXPERT_NAMES, **NORMS_OF_ALL_HEADS},
           block={"qk_norm": True, "qk_norm_over": "heads"}, only={"hidden_act": "silu", "clip_qkv": None},
           defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
           any_head_size=False, experts=FamilyExperts(OLMO_EXPERTS)),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", {**LLAMA, **EXPERT_NAMES, **SHARED_OF_QWEN}, window=USED, first_full=28,
           derives_layer_types=False, keys={"qkv_bias": "attention_bias"},
           defaults={"num_key_value_heads": 16, "qkv_bias": True, **QWEN_DEFAULTS},
           experts=FamilyExperts({**QWEN_EXPERTS, "shared_expert_intermediate_size": "shared"},
                                 same={"shared_gate": True}, dense=MLP_ONLY)),
    Family("dots1", "Dots1ForCausalLM", {**LLAMA, **EXPERT_NAMES, **BIAS_OF_DOTS, **SHARED_OF_DOTS, **NORMS_OF_A_HEAD},
           block={"qk_norm": True}, window=SLIDING, first_full=62,
           defaults={**DEEPSEEK_DEFAULTS, SLIDING: 4096, "norm_topk_prob": False},
           experts=FamilyExperts(DEEPSEEK_EXPERTS, DEEPSEEK_SAME, FIRST_DENSE, shared_in_widths=True)),
    Family("gpt_oss", "GptOssForCausalLM", {**LLAMA, **OF_GPT_OSS}, config=GptOssConfig, window=SLIDING, full_every=2,
           only={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": CLIP_SLOPE, "swiglu_limit": CLIP_LIMIT},
           defaults={"num_key_value_heads": 8, "head_dim": 64, SLIDING: 128, "rms_norm_eps": 1e-5,
                     "rope_theta": 150000.0, "router_aux_loss_coef": 0.001},
           experts=FamilyExperts(MIXTRAL_EXPERTS),
           rotary={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                   "original_max_position_embeddings": 4096},
           packing="mxfp4"),
    Family("ministral", "MinistralForCausalLM", LLAMA, window=SLIDING, full_every=0,
           defaults={"num_key_value_heads": 8, SLIDING: 4096}),
    Family("gemma", "GemmaForCausalLM", LLAMA, config=GemmaConfig, block={**GEMMA_BLOCK, "norms": "before"},
           only={"hidden_act": GELU, "use_bidirectional_attention": False}, legacy={"hidden_act": "gelu"},
           defaults={"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256}),
    Family("seed_oss", "SeedOssForCausalLM", LLAMA, keys={"attention_bias": "attention_bias"},
           only={"hidden_act": "silu", "attention_out_bias": False},
           defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}),
    Family("iquestcoder", "LlamaForCausalLM", LLAMA, defaults=LLAMA_DEFAULTS, any_heads=False),
    Family("internlm3", "LlamaForCausalLM", LLAMA, synonyms={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
           defaults={**LLAMA_DEFAULTS, "num_key_value_heads": 2}, any_heads=False),
    Family("cwm", "CwmForCausalLM", LLAMA, window=SLIDING, full_every=4, full_at=0,
           defaults={**LLAMA_DEFAULTS, "rope_theta": 1e6, SLIDING: 8192},
           rotary={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}, any_heads=False),
    # With windows, layers without one have no rotary embedding.
    Family("exaone4", "Exaone4ForCausalLM", {**PROJECTIONS, **NORMS_AFTER, **NORMS_OF_A_HEAD},
           block={"norms": "after", "qk_norm": True}, full_every=1, only={"hidden_act": "silu", SLIDING: None},
           defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, SLIDING: 4096}),
    # LOCAL_BASE is no key of theirs, but what transformers takes.
    Family("olmo3", "Olmo3ForCausalLM", OLMO, config=GemmaConfig, block=OLMO_BLOCK, window=SLIDING, full_every=4,
           defaults={"rms_norm_eps": 1e-5, SLIDING: 4096, "rope_theta": 5e5, LOCAL_BASE: 5e5}, rotary_kinds=True),
    Family("flex_olmo", "FlexOlmoForCausalLM", {**OLMO, **EXPERT_NAMES}, block=OLMO_BLOCK,
           synonyms={"num_local_experts": "num_experts"},
           defaults={"norm_topk_prob": False, "router_aux_loss_coef": 0.01, "rope_theta": 5e5},
           experts=FamilyExperts(OLMO_EXPERTS)),
    # The layers after the last one predict further tokens.
    Family("hy_v3", "HYV3ForCausalLM", {**LLAMA, **NORMS_OF_A_HEAD, **OF_HUNYUAN}, block={"qk_norm": True},
           synonyms={"num_local_experts": "num_experts"}, more_layers=True,
           defaults={**LLAMA_DEFAULTS, "rope_theta": 11158840.0, "initializer_range": 0.006, "num_shared_experts": 1,
                     "router_scaling_factor": 2.826},
           experts=FamilyExperts(HUNYUAN_EXPERTS, DEEPSEEK_SAME, MLP_TYPES, shared_in_widths=True)),
    # No layer has an MLP.
    Family("solar_open", "SolarOpenForCausalLM", {**LLAMA, **EXPERT_NAMES, **BIAS_OF_DOTS, **SHARED_OF_DOTS},
           synonyms={"num_local_experts": "n_routed_experts"},
           defaults={**LLAMA_DEFAULTS, **DEEPSEEK_DEFAULTS, "n_shared_experts": 1, "norm_topk_prob": True,
                     "rope_theta": 1e6, "intermediate_size": 1},
           experts=FamilyExperts(DEEPSEEK_EXPERTS, DEEPSEEK_SAME, shared_in_widths=True)),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in FAMILY_TABLE}


def register_family(family: Family) -> None:
    if FAMILIES.setdefault(family.model_type, family) != family:
        raise ValueError(f"Cannot register the family {family.model_type}: the name is taken")


def family_of(saved: Mapping[str, Any], source: str) -> Family:
    """Return the family of a config.json by its `model_type`; raise `UserError` for another; `source`: its path."""
    model_type = saved.get("model_type")
    if model_type == "mistral" and "layer_types" in saved:  # as transformers reads it
        model_type = "ministral"
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UserError(f"{source}: model_type is {model_type!r}; Gregale knows {', '.join(FAMILIES)}.")


# Old folders store computed tensors; a tied model may store its head, which is the embedding.
SUPERFLUOUS = (".rotary_emb.inv_freq",)
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Slot:
    """A parameter and its tensor on the hub, or one for each layer and each expert that the name has.

    - `hub`: has `{layer}` and `{expert}` in place of their numbers
    - `layers`: the numbers of the layers with it, in the order of its first axis; None: it belongs to no layer
    - `is_buffer`: whether it is a buffer, which files hold in float32
    - `part`, `parts`: the tensor's last axis has the values of several parameters in turn, and these are the `part`-th
    """

    hub: str  # the tensor's name
    path: str  # the parameter's path in the model
    axes: tuple[Axis, ...]  # the parameter's axes
    groups: tuple[tuple[str, ...], ...]  # names of axes; one dimension of the hub's tensor flattens the axes of a group
    layers: list[int] | None
    is_buffer: bool = False
    part: int = 0
    parts: int = 1

    @property
    def stacked(self) -> int:
        """Return the number of the parameter's first axes that its tensors lack: of layers, and of experts."""
        return (self.layers is not None) + ("{expert}" in self.hub)

    @property
    def own(self) -> tuple[str, ...]:
        """Return the axes of one tensor's part, in the parameter's order."""
        return tuple(axis.name for axis in self.axes[self.stacked :])

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {axis.name: axis.size for axis in self.axes}
        *first, last = (prod(sizes[name] for name in group) for group in self.groups)
        return (*first, last * self.parts)

    def cut_to(self, rows: int) -> "Slot":
        """Return the slot with `rows` rows of a vocabulary, without its padding."""
        return replace(self, axes=tuple(Axis(axis.name, rows) if axis.name == "vocab" else axis for axis in self.axes))

    def name(self, place: tuple[int, ...]) -> str:
        """Return the tensor at an index of the first axes."""
        layer = None if self.layers is None else self.layers[place[0]]
        return self.hub.format(layer=layer, expert=place[-1] if place else None)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return tensor's name -> its index in the parameter's first axes, layer by layer."""
        places = product(*(range(axis.size) for axis in self.axes[: self.stacked]))
        return {self.name(place): place for place in places}

    @property
    def flat(self) -> tuple[str, ...]:
        """Return the axes of the hub's tensor, with the axes of a group separate."""
        return tuple(name for group in self.groups for name in group)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        sizes = {axis.name: axis.size for axis in self.axes}
        return tuple(sizes[name] for name in self.flat)

    def as_flat(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of the parameter's values in the hub's tensor, with the axes `flat`."""
        return tensor.reshape(*self.flat_shape, self.parts)[..., self.part]

    def as_parameter(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of the hub's tensor with the parameter's axes, without the stacked ones."""
        return self.as_flat(tensor).transpose([self.flat.index(name) for name in self.own])


def path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def parameters_of(model: Any) -> dict[str, NamedArray]:
    """Return a model's parameters by their paths; they may be abstract."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named)[0]}


def slots_of(model: Any, family: Family) -> list[Slot]:
    """Return the slots of a model's parameters, in the order of the family's table; they may be abstract.

    Buffers that the family does not name have none.
    """
    slots, found, numbers = [], parameters_of(model), layer_numbers(layer_order(model))
    buffers = parameters_of(buffers_of(model))
    stacks = ["blocks.", *(f"blocks.parts.{structure}." for structure in range(len(numbers)))]
    for hub, (ours, axes) in family.names().items():
        names, stacked = ours.split(), stacks if "{layer}" in hub else stacks[:1]
        for part, path in [(i, name.replace("blocks.", stack, 1)) for stack in stacked for i, name in enumerate(names)]:
            if path in found:
                groups, own = tuple(tuple(group.split()) for group in axes.split(",")), found.pop(path)
                layers, is_buffer = numbers.get(layers_axis(own) or ""), path in buffers
                slot = Slot(hub, path, own.axes, groups, layers, is_buffer, part, len(names))
                assert all(is_layers(axis.name) or axis.name == EXPERTS for axis in own.axes[: slot.stacked])
                slots.append(slot)
    assert found.keys() <= buffers.keys(), f"{family.model_type} has no names for {', '.join(found)}"
    return slots


def check_names(found: set[str], slots: list[Slot], source: str) -> None:
    """Raise `UserError` for missing tensors and for tensors that the model lacks; `source`: the folder's path."""
    count = sum(prod(axis.size for axis in slot.axes[: slot.stacked]) for slot in slots if slot.part == 0)
    if count > 2 * len(found) + 1000:  # before the names are made, which may be billions
        raise UserError(f"{source}: by its config.json the model has {count:,} tensors, and its files {len(found):,}.")
    wanted = {name for slot in slots for name in slot.tensors()}
    ignored = {name for name in found if name.endswith(SUPERFLUOUS)} | {HEAD}
    problems = [
        f"{what} {listed(sorted(names))}"
        for what, names in (("lacks", wanted - found), ("also has", found - wanted - ignored))
        if names
    ]
    if problems:
        text = " and ".join(problems)
        raise UserError(f"{source} does not hold the model that its config.json describes: it {text}.")
