"""Provides the table of model families that a `LlamaConfig` supports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gregale.errors import UserError
from gregale.huggingface.experts import BIAS, FIRST_DENSE, LOSS, MLP_ONLY, FamilyExperts
from gregale.model.config import GemmaConfig, GptOssConfig, LlamaConfig
from gregale.model.kernels.reference import CLIP_LIMIT, CLIP_SLOPE

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
EXPERTS: Names = {
    "mlp.gate.weight": ("mlp.router", "router, embed"),
    "mlp.experts.{expert}.gate_proj.weight": ("mlp.gate", "mlp, embed"),
    "mlp.experts.{expert}.up_proj.weight": ("mlp.up", "mlp, embed"),
    "mlp.experts.{expert}.down_proj.weight": ("mlp.down", "embed, mlp"),
}
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


@dataclass(frozen=True)
class Family:
    """Models with the same block and the same tensor names.

    The key `window` of config.json enables a sliding window: `sliding_window` itself, or `use_sliding_window`.
    """

    model_type: str  # value in config.json
    architecture: str  # class in transformers
    layer: Names  # names of a layer's tensors, below `LAYER`
    config: type[LlamaConfig] = LlamaConfig  # configuration class of its models
    block: Mapping[str, Any] = field(default_factory=dict)  # fields with the same value in all its models
    window: str | None = None  # None: no windows
    first_full: int | None = None  # default of `max_window_layers`, first layers without a window; None: no such key
    full_every: int | None = None  # without `layer_types`, layers n, 2n, ... see all tokens; None: no such rule
    keys: Mapping[str, str] = field(default_factory=dict)  # keys of config.json that not all families have
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other names of keys, which transformers may write
    ignored: tuple[str, ...] = ()  # keys of config.json that transformers reads but does not use: null
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json may omit
    any_heads: bool = True  # whether transformers accepts a `hidden_size` that the number of heads does not divide
    any_head_size: bool = True  # whether transformers accepts one that is not the width of all heads
    derives_layer_types: bool = True  # whether all versions of transformers derive the same `layer_types`
    experts: FamilyExperts | None = None
    rotary: Mapping[str, Any] = field(default_factory=dict)  # `rope_parameters` of a config.json without any
    packing: str | None = None  # quantisation that an import decodes

    @property
    def has_layer_types(self) -> bool:
        return self.first_full is not None or self.full_every is not None

    def names(self) -> dict[str, tuple[str, str]]:
        """Return all names; those of layers have `{layer}` in the name, and `blocks.` before the parameter."""
        own = {hub: f"blocks.{ours.replace(' ', ' blocks.')}" for hub, (ours, _) in self.layer.items()}
        return {**OUTSIDE, **{LAYER + hub: (own[hub], axes) for hub, (_, axes) in self.layer.items()}}

    def lacks(self, config: LlamaConfig) -> list[str]:
        """Return the settings of a model that this family does not support: `model.norms after`."""
        wanted = {name: getattr(self.config(), name) for name in BLOCK} | dict(self.block)
        free = {*self.keys.values()}
        free |= {"sliding_window"} if self.window is not None else set()
        free |= {"full_layers"} if self.has_layer_types else set()
        differing = [name for name in BLOCK if name not in free and getattr(config, name) != wanted[name]]
        if config.hidden % config.heads and not self.any_heads:
            differing.append("heads")
        if config.heads * config.HeadSize.size != config.hidden and not self.any_head_size:
            differing.append("head_size")
        found = [f"{name} {getattr(config, name)}" for name in differing]
        if self.experts is None or config.experts is None:
            found += [] if self.experts is config.experts else ["experts" if self.experts is None else "experts null"]
        else:
            found += self.experts.lacks(config)
        return [f"model.{setting}" for setting in found]


# The fields of a block that only some families support; all families support the others.
BLOCK = (
    *("activation", "norms", "norm_offset", "qk_norm", "qk_norm_over", "attention_bias", "sliding_window", "sinks"),
    *("full_layers", "window_rotary_base", "score_width", "score_softcap", "logit_softcap", "scaled_embedding"),
)
GEMMA_BLOCK = {"activation": "gelu", "norms": "around", "norm_offset": 1.0, "scaled_embedding": True}
GEMMA_KEYS = {"query_pre_attn_scalar": "score_width", "final_logit_softcapping": "logit_softcap"}
ACTIVE = {"num_experts_per_tok": "active"}
LOSS_KEY = {"router_aux_loss_coef": LOSS}
QWEN_EXPERTS = {"num_experts": "count", "moe_intermediate_size": "width", "norm_topk_prob": "renormalise"}
QWEN_DEFAULTS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001}
SCORE_SOFTCAP = "attn_logit_softcapping"
GEMMA_ONLY = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", {**PROJECTIONS, **NORMS_BEFORE}, any_heads=False),
        Family(
            "mistral",
            "MistralForCausalLM",
            {**PROJECTIONS, **NORMS_BEFORE},
            window="sliding_window",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            {**PROJECTIONS, **NORMS_BEFORE},
            block={"attention_bias": True},
            window="use_sliding_window",
            first_full=28,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            {**PROJECTIONS, **NORMS_BEFORE, **NORMS_OF_A_HEAD},
            block={"qk_norm": True},
            window="use_sliding_window",
            first_full=28,
            defaults={"head_dim": 128},
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            {**PROJECTIONS, **NORMS_AFTER, **NORMS_OF_ALL_HEADS},
            block={"norms": "after", "qk_norm": True, "qk_norm_over": "heads"},
            defaults={"rms_norm_eps": 1e-5},
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            {**PROJECTIONS, **NORMS_AROUND},
            config=GemmaConfig,
            block=GEMMA_BLOCK,
            window="sliding_window",
            full_every=2,
            keys={**GEMMA_KEYS, SCORE_SOFTCAP: "score_softcap"},
            only=GEMMA_ONLY,
            defaults={**GEMMA_DEFAULTS, SCORE_SOFTCAP: 50.0, "final_logit_softcapping": 30.0},
            any_heads=False,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            {**PROJECTIONS, **NORMS_AROUND, **NORMS_OF_A_HEAD},
            config=GemmaConfig,
            block={**GEMMA_BLOCK, "qk_norm": True},
            window="sliding_window",
            full_every=6,
            keys={**GEMMA_KEYS, "rope_local_base_freq": "window_rotary_base"},
            only=GEMMA_ONLY,
            ignored=(SCORE_SOFTCAP,),
            defaults={**GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            any_heads=False,
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            {**PROJECTIONS, **EXPERTS_OF_MIXTRAL, **NORMS_BEFORE},
            window="sliding_window",
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "router_aux_loss_coef": 0.001,
            },
            experts=FamilyExperts({"num_local_experts": "count", **ACTIVE, "intermediate_size": "width", **LOSS_KEY}),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {**PROJECTIONS, **EXPERTS, **NORMS_BEFORE, **NORMS_OF_A_HEAD},
            block={"qk_norm": True},
            window="use_sliding_window",
            synonyms={"num_local_experts": "num_experts"},
            defaults={"num_key_value_heads": 4, **QWEN_DEFAULTS},
            experts=FamilyExperts({**QWEN_EXPERTS, **ACTIVE, **LOSS_KEY}, dense=MLP_ONLY),
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            {**PROJECTIONS, **EXPERTS, **NORMS_BEFORE, **NORMS_OF_ALL_HEADS},
            block={"qk_norm": True, "qk_norm_over": "heads"},
            only={"hidden_act": "silu", "clip_qkv": None},
            defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
            any_head_size=False,
            experts=FamilyExperts(
                {
                    "num_experts": "count",
                    "intermediate_size": "width",
                    "norm_topk_prob": "renormalise",
                    **ACTIVE,
                    **LOSS_KEY,
                }
            ),
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {**PROJECTIONS, **EXPERTS, **SHARED_OF_QWEN, **NORMS_BEFORE},
            window="use_sliding_window",
            first_full=28,
            derives_layer_types=False,
            keys={"qkv_bias": "attention_bias"},
            defaults={"num_key_value_heads": 16, "qkv_bias": True, **QWEN_DEFAULTS},
            experts=FamilyExperts(
                {**QWEN_EXPERTS, **ACTIVE, **LOSS_KEY, "shared_expert_intermediate_size": "shared"},
                same={"shared_gate": True},
                dense=MLP_ONLY,
            ),
        ),
        Family(
            "dots1",
            "Dots1ForCausalLM",
            {**PROJECTIONS, **EXPERTS, **BIAS_OF_DOTS, **SHARED_OF_DOTS, **NORMS_BEFORE, **NORMS_OF_A_HEAD},
            block={"qk_norm": True},
            window="sliding_window",
            first_full=62,
            defaults={
                "sliding_window": 4096,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
            },
            experts=FamilyExperts(
                {
                    "n_routed_experts": "count",
                    "moe_intermediate_size": "width",
                    "n_shared_experts": "shared",
                    "norm_topk_prob": "renormalise",
                    "routed_scaling_factor": "scale",
                    "n_group": "groups",
                    "topk_group": "active_groups",
                    **ACTIVE,
                },
                same={"score": "sigmoid", "router": "float32", BIAS: True},
                dense=FIRST_DENSE,
                shared_in_widths=True,
            ),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            {**PROJECTIONS, **OF_GPT_OSS, **NORMS_BEFORE},
            config=GptOssConfig,
            window="sliding_window",
            full_every=2,
            only={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": CLIP_SLOPE, "swiglu_limit": CLIP_LIMIT},
            defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
            | {"rope_theta": 150000.0, "router_aux_loss_coef": 0.001},
            experts=FamilyExperts({"num_local_experts": "count", **ACTIVE, "intermediate_size": "width", **LOSS_KEY}),
            rotary={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            | {"original_max_position_embeddings": 4096},
            packing="mxfp4",
        ),
    )
}


def family_of(model_type: object, source: str) -> Family:
    """Return the family of a config.json's `model_type`; raise `UserError` for another one; `source`: its path."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UserError(f"{source}: model_type is {model_type!r}; Gregale knows {', '.join(FAMILIES)}.")


def family_that_has(config: LlamaConfig, preferred: object = None) -> Family:
    """Return a family that supports a configuration, the preferred one if possible; raise `UserError` if none does."""
    candidates = [family for family in FAMILIES.values() if (family.experts is None) == (config.experts is None)]
    order = sorted(candidates, key=lambda family: family.model_type != preferred)
    for family in order:
        if not family.lacks(config):
            return family
    lacking = "; ".join(f"{family.model_type} not {', '.join(family.lacks(config))}" for family in order)
    raise UserError(f"model: no family of transformers has this block, so that nothing could load it ({lacking}).")
