"""Small models of every family, made by transformers."""

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from gregale.data.tokenizers import BytesTokenizer
from gregale.huggingface.families import BIAS, Family
from gregale.huggingface.tokenizer import write_tokenizer
from gregale.model.config import BalanceConfig, ExpertsConfig
from gregale.model.llama import LlamaConfig

VOCABULARY, CONTEXT = 257, 64
PROMPT = "the wind and the "
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
OF_KINDS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 32,
}
WINDOW = {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIED = {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 10}
MIXED_KINDS = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
MIXED = MIXED_KINDS | {"head_dim": 10}
GEMMA = {"head_dim": 16, "sliding_window": 5}
# A name -> model_type and what its config.json has beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "llama3": ("llama", TIED),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("qwen2", WINDOW),
    "qwen3": ("qwen3", {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0,
        "rope_parameters": YARN,
    }),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", GEMMA | {
        "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", GEMMA | {
        "num_hidden_layers": 3, "query_pre_attn_scalar": 16, "rope_parameters": OF_KINDS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {
        "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0, 1], "use_sliding_window": True,
        "sliding_window": 7, "num_hidden_layers": 3,
    }),
    "qwen3_moe_plain": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3}),
    "olmoe_normalised": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | WINDOW | {
        "shared_expert_intermediate_size": 24, "layer_types": ["sliding_attention"] * 2, "max_window_layers": 0,
    }),
    "qwen2_moe_mixed": ("qwen2_moe", EXPERTS | WINDOW | {
        "shared_expert_intermediate_size": 24, "layer_types": ["full_attention", "sliding_attention"],
    }),
    "qwen2_moe_normalised": ("qwen2_moe", EXPERTS | {
        "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [1, 0],
    }),
    "dots1": ("dots1", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "num_hidden_layers": 3, "sliding_window": 5, "max_window_layers": 1,
    }),
    "gpt_oss": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5, "intermediate_size": 64,
        "rope_parameters": YARN | {"truncate": False},
    }),
    "ministral": ("ministral", MIXED | {"rope_parameters": LLAMA3}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"head_dim": 10}),
    "iquestcoder": ("iquestcoder", TIED),
    "internlm3": ("internlm3", TIED),
    "cwm": ("cwm", MIXED | {"rope_parameters": LLAMA3, "bos_token_id": 0}),
    "exaone4": ("exaone4", {"head_dim": 10, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "olmo3": ("olmo3", MIXED_KINDS | {"rope_parameters": {
        "full_attention": YARN | {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }}),
    "flex_olmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "hy_v3": ("hy_v3", {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_shared_experts": 2,
        "head_dim": 10, "router_scaling_factor": 1.5,
    }),
    "solar_open": ("solar_open", {
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
        "head_dim": 10, "routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 2,
    }),
    "gpt_oss_plain": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
}  # fmt: skip

# Of these only the configurations are compared: other rows have the same arithmetic.
CONFIGURATIONS = ("llama2", "gpt_oss_plain", "qwen3_moe_plain", "olmoe_normalised", "qwen2_moe_normalised")
CONFIGURATIONS += ("qwen2_moe_mixed",)
# Of these logits and gradients are compared, and no export and no text: other rows have the same programs.
WITHOUT_TEXT = ("mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3")


def of_family(family: Family, **sizes: Any) -> LlamaConfig:
    """A model of a family, as its table says."""
    if (own := family.experts) is not None:
        same, shared = dict(own.same), 768 if "shared" in own.keys.values() else 0
        balance = BalanceConfig(bias=same.pop(BIAS, False))
        sizes["experts"] = ExpertsConfig(**{"shared": shared, **same}, balance=balance)
    return family.config(**sizes, **family.block)


def made(name: str, folder: Path, shard: str = "5GB", dtype: str = "float32", **sizes: int) -> Any:
    """Writes a model with random weights, biases and norms too, into a folder; returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings, **sizes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Biases, sinks and norms away from 0 and 1, where a mistake in them would not show.
            if parameter.ndim == 1 or "bias" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if model_type == "gpt_oss" and key.endswith("gate_up_proj"):  # so that gates are clipped
                parameter.mul_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(BytesTokenizer(), folder, CONTEXT)
    return model


def values(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor that the files have, without Gregale's names and rules."""
    return {name: array.tobytes() for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def continued(folder: Path) -> str:
    """What transformers continues the prompt with, of bytes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")
