"""The families of models that a `LlamaConfig` can be, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gregale.errors import UserError
from gregale.model.config import LlamaConfig

LAYER = "model.layers.{layer}."

# Hub name -> (parameter, axes of the hub's tensor: those between two commas lie flattened in one dimension).
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
NORMS_OF_A_HEAD: Names = {
    "self_attn.q_norm.weight": ("attention.query_norm.weight", "head_size"),
    "self_attn.k_norm.weight": ("attention.key_norm.weight", "head_size"),
}
NORMS_OF_ALL_HEADS: Names = {
    "self_attn.q_norm.weight": ("attention.query_norm.weight", "heads head_size"),
    "self_attn.k_norm.weight": ("attention.key_norm.weight", "kv_heads head_size"),
}


@dataclass(frozen=True)
class Family:
    """Models with one block and one way to name its tensors.

    - `model_type`: in config.json
    - `architecture`: the class of transformers
    - `layer`: names of a layer's tensors, below `LAYER`
    - `block`: fields of `LlamaConfig` that are so in every model of it; all other choices of the block are the default
    - `window`: which key of config.json turns a sliding window on: `sliding_window` itself, or `use_sliding_window`;
      None: it has none
    - `defaults`: of keys that config.json may leave out
    """

    model_type: str
    architecture: str
    layer: Names
    block: Mapping[str, Any] = field(default_factory=dict)
    window: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, tuple[str, str]]:
        """All of its names; those of layers with `{layer}` in them, and with `blocks.` before the parameter."""
        layers = {LAYER + hub: (f"blocks.{ours}", axes) for hub, (ours, axes) in self.layer.items()}
        return {**OUTSIDE, **layers}

    def lacks(self, config: LlamaConfig) -> list[str]:
        """The settings of a model that this family cannot have: `model.norms after`."""
        wanted = {name: getattr(DEFAULT, name) for name in BLOCK} | dict(self.block)
        differing = [name for name in BLOCK if getattr(config, name) != wanted[name]]
        if config.sliding_window is not None and self.window is None:
            differing.append("sliding_window")
        return [f"model.{name} {getattr(config, name)}" for name in differing]


DEFAULT = LlamaConfig()
BLOCK = ("norms", "qk_norm", "qk_norm_over", "attention_bias")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", {**PROJECTIONS, **NORMS_BEFORE}),
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
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            {**PROJECTIONS, **NORMS_BEFORE, **NORMS_OF_A_HEAD},
            block={"qk_norm": True},
            window="use_sliding_window",
            defaults={"head_dim": 128},
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            {**PROJECTIONS, **NORMS_AFTER, **NORMS_OF_ALL_HEADS},
            block={"norms": "after", "qk_norm": True, "qk_norm_over": "heads"},
            defaults={"rms_norm_eps": 1e-5},
        ),
    )
}


def family_of(model_type: object, place: str) -> Family:
    """The family of a config.json's `model_type`; raises `UserError` if it is none of these."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UserError(f"{place}: model_type is {model_type!r}; Gregale knows {', '.join(FAMILIES)}.")


def family_that_has(config: LlamaConfig, preferred: object = None) -> Family:
    """A family whose models can be of this configuration: the preferred one if it can, else the first that can.

    Raises `UserError` if there is none.
    """
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    for family in order:
        if not family.lacks(config):
            return family
    lacking = "; ".join(f"{family.model_type} not {', '.join(family.lacks(config))}" for family in order)
    raise UserError(f"model: no family of transformers has this block, so that nothing could load it ({lacking}).")
