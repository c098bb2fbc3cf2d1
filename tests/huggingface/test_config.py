"""What a `config.json` may say that a model of Gregale cannot be is refused, and which family a model can be."""

import re
from dataclasses import replace

import pytest

from gregale.errors import UserError
from gregale.huggingface.config import read_config
from gregale.huggingface.families import FAMILIES, family_that_has
from gregale.model.config import GemmaConfig, LlamaConfig
from gregale.model.experts_config import BalanceConfig, ExpertsConfig
from tests.huggingface.hub import EXPERTS, SIZES, of_family

LLAMA = {**SIZES, "model_type": "llama"}


KINDS = ["chunked_attention", "full_attention"]
SLIDING = {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]}
BOTH = {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN = {"model_type": "qwen3_moe", **EXPERTS}
SHARED = {**QWEN, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; Gregale knows llama, mistral, qwen2, qwen3, olmo2"),
        ({"hidden_size": None}, "hidden_size is None; it has to be there"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_key_value_heads": 3}, "model.kv_heads is 3"),
        ({"rms_norm_eps": 0.0}, "norm_epsilon is 0"),
        ({"rope_theta": "x"}, "is damaged: a number"),
        ({"rope_theta": 10**400}, "is damaged: a number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            "is of type 'longrope'; Gregale has default, linear, llama3 and yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, "is damaged: .*rotary scaling.*'factor'"),
        (
            SLIDING | {"use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS},
            r"has 2 entries \(chunk",
        ),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "is damaged"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"vocab_size": 2**62}, "vocab_size is 4611686018427387904; .* from 1 to 2,147,483,647"),
        ({"model_type": "gemma2", "sliding_window": None}, "layers are sliding_attention, but there is no"),
        (SLIDING, "layers are sliding_attention, but there is no sliding_window, or it is not used"),
        ({"quantization_config": {"quant_method": "bitnet"}}, r"quantization_config is set \(quant_method 'bitnet'\)"),
        (BOTH, "rope_parameters and rope_scaling are both set, and differ"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by kinds of layers, which no llama has"),
        ({"rope_scaling": LLAMA3}, "is damaged: .*rotary scaling.*'original_max_position_embeddings'"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"model_type": "qwen3_moe"}, "num_experts is None; it has to be there"),
        (QWEN | {"num_experts_per_tok": 5}, "active is 5, and a token can choose among 4 experts"),
        (
            QWEN | {"num_hidden_layers": 3, "decoder_sparse_step": 2},
            r"the layers without experts are 0 and 2; Gregale",
        ),
        (QWEN | {"mlp_only_layers": [1]}, r"by decoder_sparse_step 1 and mlp_only_layers \[1\], .* are 1;"),
        (QWEN | {"mlp_only_layers": [0, 1]}, "dense_layers is 2, and there are 2 layers: no layer would have experts"),
        (
            SHARED | {"use_sliding_window": True, "sliding_window": 8},
            "has no layer_types, and versions of transformers",
        ),
        ({**EXPERTS, "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 2.0}, "transformers ignores it in a gemma3_text"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_key(changes, words):
    with pytest.raises(UserError) as error:
        read_config({**LLAMA, **changes}, "config.json")
    assert re.search(words, str(error.value))


def test_old_and_new_forms_of_the_rotary_frequencies_are_the_same():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    assert read_config(LLAMA | old, "") == read_config(LLAMA | new, "") == read_config(LLAMA | old | new, "")


def test_both_names_of_the_number_of_experts_and_steps_that_mean_dense_first_are_read():
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN.items()}
    assert read_config(LLAMA | renamed, "") == read_config(LLAMA | QWEN, "")
    _, config = read_config(LLAMA | QWEN | {"decoder_sparse_step": 2}, "")
    balance = BalanceConfig(loss=0.001)
    assert config.experts == ExpertsConfig(4, 2, width=16, renormalise=False, balance=balance)
    assert config.dense_layers == 1


def test_older_forms_of_gemma_3_are_the_same():
    """As the first ones on the hub say it, and as transformers 5 does."""
    gemma = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}
    old = {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": None}
    rotary = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
    kinds = ["full_attention" if layer in (2, 5) else "sliding_attention" for layer in range(7)]
    _, config = read_config(gemma | old, "")
    assert config == read_config(gemma | {"layer_types": kinds, "rope_parameters": rotary}, "")[1]
    assert (config.full_layers, config.kind_numbers) == ((2, 5), (0, 0, 1, 0, 0, 1, 0))
    assert [(kind.window, kind.rotary_base) for kind in config.kinds] == [(8, 2e4), (None, 1e6)]


def test_a_model_goes_out_as_a_family_that_can_be_it():
    plain = LlamaConfig()
    assert family_that_has(plain).model_type == "llama"
    assert family_that_has(plain, "mistral").model_type == "mistral"
    assert family_that_has(replace(plain, sliding_window=8), "llama").model_type == "mistral"
    assert family_that_has(replace(plain, hidden=100, heads=3, head_size=32), "llama").model_type == "mistral"
    for name, family in FAMILIES.items():
        assert family_that_has(of_family(family), name) == family
    gemma3 = FAMILIES["gemma3_text"]
    with pytest.raises(UserError, match=r"gemma3_text not model.score_softcap 2.0;"):
        family_that_has(GemmaConfig(**gemma3.block, score_softcap=2.0), "gemma3_text")
    with pytest.raises(UserError, match=r"llama not model.qk_norm True, model.attention_bias True; mistral not"):
        family_that_has(replace(plain, qk_norm=True, attention_bias=True))
