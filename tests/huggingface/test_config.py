"""What a `config.json` may say that a model of Gregale cannot be is refused, and which family a model can be."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args, get_origin, get_type_hints

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from transformers import CONFIG_MAPPING

from gregale.errors import UserError
from gregale.huggingface.config import exported_family, family_that_has, lacking, read_config, written_config
from gregale.huggingface.families import FAMILIES, Family, TypedJson
from gregale.model.config import BalanceConfig, ExpertsConfig, RotaryScaling, YarnScaling
from gregale.model.llama import GemmaConfig, LlamaConfig
from tests.huggingface.hub import EXPERTS, MODELS, SIZES, YARN, of_family

TINY: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 2, "mlp": 24}
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
        ({"hidden_size": None}, "hidden_size is None; it has to be of type int, from 1 to 2,147,483,647"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_key_value_heads": 3}, "model.kv_heads is 3"),
        ({"rms_norm_eps": 0.0}, "norm_epsilon is 0"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; it has to be of type float"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; it has to be of type float"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            "is of type 'longrope'; Gregale has default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 6.0}}, "'dynamic'; .* it is that of none: remove it"),
        ({"model_type": "internlm3", "qkv_bias": True}, "attention_bias is True"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"model_type": "exaone4"}, "sliding_window is 4096; Gregale computes models whose sliding_window is None"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing; it has to be of type float"),
        (SLIDING | {"use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS}, r"has 2 entries \(chunk"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0; .* from 1"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"vocab_size": 2**62}, "vocab_size is 4611686018427387904; .* from 1 to 2,147,483,647"),
        ({"model_type": "gemma2", "sliding_window": None}, "layers are sliding_attention, but there is no"),
        (SLIDING, "layers are sliding_attention, but there is no sliding_window, or it is not used"),
        ({"quantization_config": {"quant_method": "bitnet"}}, r"quantization_config is set \(quant_method 'bitnet'\)"),
        (BOTH, "rope_parameters and rope_scaling are both set, and differ"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by kinds of layers, which no llama has"),
        ({"rope_scaling": LLAMA3}, "rope_scaling: original_max_position_embeddings is missing"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"model_type": "qwen3_moe"}, "num_experts is missing; it has to be of type int"),
        (QWEN | {"num_experts_per_tok": 5}, "active is 5, and a token can choose among 4 experts"),
        (QWEN | {"num_hidden_layers": 3, "decoder_sparse_step": 2}, r"the layers without experts are 0 and 2; Gregale"),
        (QWEN | {"mlp_only_layers": [1]}, r"by decoder_sparse_step 1 and mlp_only_layers \[1\], .* are 1;"),
        (QWEN | {"mlp_only_layers": [0, 1]}, "dense_layers is 2, and there are 2 layers: no layer would have experts"),
        (
            SHARED | {"use_sliding_window": True, "sliding_window": 8},
            "it has no layer_types, and versions of transformers",
        ),
        ({**EXPERTS, "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 2.0}, "transformers ignores it in a gemma3_text"),
        (QWEN | {"num_experts_per_tok": None}, "num_experts_per_tok is None; it has to be of type int"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5; it has to be of type int"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, .* set it to null"),
        (SLIDING | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, .* set it to null"),
        (QWEN | {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it has to be of type bool"),
        (QWEN | {"router_aux_loss_coef": "x"}, "router_aux_loss_coef is 'x'; it has to be of type float"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it has to be of type int, from 1"),
        (QWEN | {"mlp_only_layers": ["x"]}, r"mlp_only_layers is \['x'\]; it has to be of type list of int"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_key(changes, words):
    with pytest.raises(UserError) as error:
        read_config({**LLAMA, **changes}, "config.json")
    assert re.search(words, str(error.value))


OLD_ROTARY = {"rope_theta": 1e4, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
JUNK = (None, True, "x", -1, 0, 1.5, [], ["x"], {}, {"x": 1}, math.nan, math.inf, 10**400, 2**31 - 1)


def is_of(kind: Any, value: Any) -> bool:
    """Whether a field has a value of its type."""
    if dataclasses.is_dataclass(value):
        kinds = get_type_hints(type(value))
        return all(is_of(kinds[each.name], getattr(value, each.name)) for each in dataclasses.fields(value))
    if get_args(kind) and get_origin(kind) is not tuple:
        return any(is_of(each, value) for each in get_args(kind))
    if isinstance(value, tuple):
        return all(is_of(get_args(kind)[0], each) for each in value)
    return type(value) is kind and (kind is not float or math.isfinite(value))


def junk_result(saved: dict[str, Any], source: str, key: str, junk: Any) -> str | LlamaConfig:
    """What a file gives with another value of a key, which may lie in an object of the file."""
    changed = {key: junk}
    for name in reversed(source.split(", ")[1:]):
        changed = {name: {**(saved.get(name) or {}), **changed}}
    try:
        return read_config({**saved, **changed}, "config.json")[1]
    except UserError as error:
        return str(error)


def test_each_key_that_is_read_has_a_type_and_a_range(monkeypatch):
    """A value of another type is refused, or the fields of the configuration have their types nevertheless."""
    read, tried, keys = TypedJson.read, set(), {}

    def recorded(self, key, kind, *arguments, **named):
        keys[self.source, key, str(kind)] = None
        return read(self, key, kind, *arguments, **named)

    for model_type, settings in MODELS.values():
        for form in ({}, {**OLD_ROTARY, "rope_parameters": None}):
            saved = {**SIZES, **settings, "model_type": model_type, **form}
            with monkeypatch.context() as patch:
                patch.setattr(TypedJson, "read", recorded)
                family, config = read_config(saved, "config.json")
            assert is_of(family.config, config)
            for (source, key, _), junk in product(keys.keys() - tried, JUNK):
                found = junk_result(saved, source, key, junk)
                assert found.startswith("config.json") if isinstance(found, str) else is_of(family.config, found), key
            tried |= keys.keys()
    assert len(tried) > 50


FORMS: list[dict[str, Any]] = [
    {"model_type": "gemma2", "sliding_window": 5, "use_bidirectional_attention": None},
    {"model_type": "gemma2", "sliding_window": 5},
    {"model_type": "llama", **OLD_ROTARY},
    {"model_type": "llama", "rope_parameters": {**YARN, "mscale": 1, "mscale_all_dim": 1, "truncate": True}},
    {"model_type": "llama", "mlp_bias": None, "head_dim": None, "rope_scaling": None},
    {**QWEN, "router_aux_loss_coef": 0, "mlp_only_layers": None},
    {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2, "rope_theta": 1e6},
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_config_that_describes_the_model_is_written_as_it_was_read(form):
    saved = {**SIZES, **form}
    family, config = read_config(saved, "config.json")
    before = {**saved, "architectures": [family.architecture]}
    assert written_config(config, family, 257, before) == before
    longer = replace(config, norm_epsilon=1e-3)
    written = json.loads(json.dumps(written_config(longer, family, 300, before)))
    assert read_config(written, "config.json") == (
        family,
        replace(longer, vocabulary=300, head_size=config.HeadSize.size),
    )


LOOSE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # a file, and another one with the same meaning
    ("llama", {"tie_word_embeddings": None, "initializer_range": None}, {}),
    ("llama", {"rms_norm_eps": None, "rope_theta": None}, {}),
    ("gemma", {"tie_word_embeddings": None, "head_dim": 8.0}, {"tie_word_embeddings": True, "head_dim": 8}),
    ("qwen2", {"use_sliding_window": None, "max_window_layers": None, "sliding_window": 8}, {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 2.0}, {}),
    ("gemma2", {"sliding_window": 0, "layer_types": ["full_attention"] * 2}, {"layer_types": ["full_attention"] * 2}),
    ("mistral", {"sliding_window": 8.0, "hidden_size": 32.0}, {"sliding_window": 8}),
    ("olmo3", {"rope_theta": None, "sliding_window_pattern": None}, {}),
    ("qwen3_moe", {"norm_topk_prob": None, "router_aux_loss_coef": None, "decoder_sparse_step": None}, {}),
    ("cwm", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8.0, "rope_type": None, "type": "llama3"}},
     {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8}}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "loose", "strict"), LOOSE)
def test_null_and_whole_floats_are_read_as_older_versions_of_transformers_do(model_type, loose, strict):
    """They go out as the version at hand takes them."""
    saved = {**SIZES, **EXPERTS, "model_type": model_type, "bos_token_id": 0}
    absent = {key: value for key, value in saved.items() if loose.get(key, value) is not None}
    family, config = read_config({**saved, **loose}, "config.json")
    assert (family, config) == read_config({**absent, **strict}, "config.json")
    written = written_config(config, family, 257, {**saved, **loose})
    assert read_config(written, "config.json")[1] == config
    CONFIG_MAPPING[model_type].from_dict(written)


def test_old_and_new_forms_of_the_rotary_frequencies_are_the_same():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "type": None, "rope_theta": 5e5, "factor": 4.0}}
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
    llama = {"model_type": "llama"}
    assert family_that_has(plain, {"model_type": "mistral"}).model_type == "mistral"
    assert family_that_has(replace(plain, sliding_window=8), llama).model_type == "mistral"
    assert family_that_has(replace(plain, sliding_window=8, full_layers=(1,)), llama).model_type == "ministral"
    assert family_that_has(replace(plain, hidden=100, heads=3, head_size=32), llama).model_type == "mistral"
    for name, family in FAMILIES.items():
        assert family_that_has(of_family(family), {"model_type": name}) == family
    gemma3 = FAMILIES["gemma3_text"]
    with pytest.raises(UserError, match=r"gemma3_text not model.score_softcap 2.0;"):
        family_that_has(GemmaConfig(**gemma3.block, score_softcap=2.0), {"model_type": "gemma3_text"})
    with pytest.raises(
        UserError, match=r"nearest ones: qwen2 not model.qk_norm True; .*qwen3 not model.attention_bias"
    ):
        family_that_has(replace(plain, qk_norm=True, attention_bias=True))


@dataclass(frozen=True)
class EverySecond(LlamaConfig):
    """Experts in every second layer."""

    @property
    def structure_numbers(self):
        return tuple(layer % 2 for layer in range(self.layers))

    def structure(self, number):
        return LlamaConfig(**TINY, qk_norm=True, experts=self.experts if number else None)


@dataclass(frozen=True)
class Still(RotaryScaling):
    def kept(self, frequency):
        return np.zeros_like(frequency)


@dataclass(frozen=True)
class EveryFourth(LlamaConfig):
    """No rotary embedding in every fourth layer."""

    strides: int = 4

    def _kind(self, layer):
        kind = super()._kind(layer)
        return kind if (layer + 1) % self.strides else kind._replace(rotary_scaling=Still(1e30))


@dataclass(frozen=True)
class Slow(YarnScaling):
    def kept(self, frequency):
        return super().kept(frequency) / 2


@dataclass(frozen=True)
class Capped(LlamaConfig):
    @property
    def logits(self):
        return super().logits._replace(cap=30.0)


@dataclass(frozen=True)
class Odd(ExpertsConfig):
    """Experts that may be others."""


@dataclass(frozen=True)
class Built(LlamaConfig):
    """Modules with other settings than the configuration, of Gregale's own classes."""

    change: Callable[[Any], Any] = lambda model: model

    def init(self, Vocab, key):
        return self.change(super().init(Vocab, key))


def with_epsilon(model):
    return eqx.tree_at(lambda model: model.norm, model, replace(model.norm, epsilon=0.5))


def normed_after(model):
    return replace(model, blocks=replace(model.blocks, config=replace(model.config, norms="after")))


def with_table(model):
    return replace(model, norm=replace(model.norm, weight=model.embedding))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            EverySecond(**TINY, qk_norm=True, experts=ExpertsConfig(4, 2, 8)),
            "qwen3_moe not model.structure_numbers 1 in layer 1",
        ),
        (EveryFourth(**TINY), r"llama not model.rotary_scaling Still\(.* in layer 3"),
        (LlamaConfig(**TINY, rotary_scaling=Slow()), r"llama not model.rotary_scaling Slow\(factor=8.0"),
        (LlamaConfig(**TINY, rotary_scaling=Still()), r"llama not model.rotary_scaling Still\(factor=8.0"),
        (Capped(**TINY), "llama not model.logits 30.0"),
        (LlamaConfig(**TINY, experts=Odd(4, 2, 8)), "mixtral not model.experts Odd"),
        (Built(**TINY, change=with_epsilon), "the model.norm.epsilon is not that of a llama: 0.5 and not 1e-05"),
        (Built(**TINY, change=normed_after), "the model.blocks.config is not that of a llama: model.norms after"),
        (Built(**TINY, change=with_table), r"norm.weight is .*vocab.* in a llama, so that nothing could load it"),
    ],
)
def test_a_model_that_differs_in_settings_alone_is_refused(config, words):
    Vocab = Axis("vocab", 9)
    model = jax.eval_shape(lambda: config.init(Vocab, jax.random.key(0)))
    with pytest.raises(UserError, match=words) as error:
        exported_family(model, config, Vocab, {})
    assert "\n" not in str(error.value)


def test_a_family_of_ones_own_has_a_configuration_of_ones_own(monkeypatch):
    """What `EveryFourth` computes is what its family is, and of no other; each of its fields needs a key."""
    family = Family("fourth", "FourthForCausalLM", FAMILIES["llama"].layer, config=EveryFourth)
    monkeypatch.setitem(FAMILIES, "fourth", family)
    Vocab, config = Axis("vocab", 9), EveryFourth(**TINY)
    model = jax.eval_shape(lambda: config.init(Vocab, jax.random.key(0)))
    assert exported_family(model, config, Vocab, {}) == family
    assert lacking(LlamaConfig(**TINY), family) == ["model.type llama"]
    assert "model.strides 3" in lacking(replace(config, strides=3), family)


def test_what_an_imported_file_says_beside_is_part_of_the_proof():
    """A key that stays from the import may change the meaning of those that are written."""
    config, key = LlamaConfig(**TINY), {"model_type": "llama", "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match=r"llama not config.json: partial_rotary_factor is 0.5; Gregale computes"):
        family_that_has(config, key)
    stale = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e4}}
    assert family_that_has(config, {"model_type": "llama", **stale}).model_type == "llama"


def test_a_mistral_with_kinds_of_layers_and_an_old_gemma_are_what_transformers_reads():
    mistral = LLAMA | {
        "model_type": "mistral",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    family, config = read_config(mistral, "")
    assert (family.model_type, config.sliding_window, config.full_layers) == ("ministral", 5, (1,))
    gemma = LLAMA | {"model_type": "gemma"}
    assert read_config(gemma | {"hidden_act": "gelu"}, "") == read_config(gemma, "")


def test_layers_without_experts_by_their_types_are_the_first_ones():
    hunyuan = LLAMA | EXPERTS | {"model_type": "hy_v3", "num_hidden_layers": 3}
    assert read_config(hunyuan, "")[1].dense_layers == 1
    assert read_config(hunyuan | {"mlp_layer_types": ["dense", "dense", "sparse"]}, "")[1].dense_layers == 2
    for kinds, words in (
        (["sparse", "dense", "sparse"], "the layers without experts are 1;"),
        (["dense"], "for each of the 3"),
    ):
        with pytest.raises(UserError, match=words):
            read_config(hunyuan | {"mlp_layer_types": kinds}, "")
