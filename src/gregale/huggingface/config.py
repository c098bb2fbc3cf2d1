"""`config.json` to `LlamaConfig`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gregale.errors import KeyedError, UserError
from gregale.huggingface.families import Family, family_of
from gregale.model.config import LlamaConfig
from gregale.model.scaling import LinearScaling, Llama3Scaling, RotaryScaling

SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp",
    "vocab_size": "vocabulary",
}
OTHERS = {
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "tie_word_embeddings": "tied_head",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_scale",
}
DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
ONLY = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
LLAMA3 = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}


def read_config(saved: Mapping[str, Any], place: str) -> tuple[Family, LlamaConfig]:
    """The family and the configuration that a config.json describes.

    Arguments:
    - `saved`: its content
    - `place`: is named in messages

    Raises `UserError` for another family, for a missing size, and for what a `LlamaConfig` cannot say.
    """
    family = family_of(saved.get("model_type"), place)
    given = {**DEFAULTS, **family.defaults, **saved}
    for key in SIZES:
        if not isinstance(size := given.get(key), int) or size < 1:
            raise UserError(f"{place}: {key} is {size!r}; it has to be there, and a whole number above 0.")
    for key, only in ONLY.items():
        if given.get(key, only) not in (only, None):
            raise UserError(f"{place}: {key} is {given[key]!r}; Gregale computes models whose {key} is {only!r}.")
    try:
        base, scaling = _rotary(given, place)
        return family, LlamaConfig(
            **{ours: given[key] for key, ours in (SIZES | OTHERS).items() if key in given},
            **family.block,
            sliding_window=_window(given, family, place),
            rotary_base=base,
            rotary_scaling=scaling,
        )
    except KeyedError as error:
        raise UserError(f"{place}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{place} is damaged: a number, or a part of the rotary scaling, is not what it has to be ({error})."
        ) from None


def _rotary(given: Mapping[str, Any], place: str) -> tuple[float, RotaryScaling | None]:
    """Base and scaling: of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling`."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, LinearScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        return base, Llama3Scaling(
            factor=float(rope["factor"]), **{ours: rope[key] for key, ours in LLAMA3.items() if key in rope}
        )
    raise UserError(f"{place}: the rotary scaling is of type {kind!r}; Gregale has default, linear and llama3.")


def _window(given: Mapping[str, Any], family: Family, place: str) -> int | None:
    """The sliding window of all layers."""
    if family.window is None or not given.get(family.window) or given.get("sliding_window") is None:
        return None
    layers = given["num_hidden_layers"]
    kinds = given.get("layer_types")
    if kinds is None:
        first = given.get("max_window_layers", 28) if family.window == "use_sliding_window" else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(set(kinds)) > 1:
        count = sum(kind == "sliding_attention" for kind in kinds)
        raise UserError(
            f"{place}: {count} of {layers} layers have a sliding window; Gregale's have it all, or none has it."
        )
    return given["sliding_window"] if kinds[0] == "sliding_attention" else None


def written_config(config: LlamaConfig, family: Family, vocabulary: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model.

    Arguments:
    - `family`: one that can say it
    - `vocabulary`: rows of the embedding
    - `before`: the config.json that the model came with; keys that say nothing of its shape stay, and so does the form
      in which it says the rotary frequencies
    """
    fields = {key: getattr(config, ours) for key, ours in (SIZES | OTHERS).items()}
    fields |= {
        "vocab_size": vocabulary,
        "num_key_value_heads": config.KvHeads.size,
        "head_dim": config.HeadSize.size,
        "hidden_act": "silu",
    }
    if family.window is not None:
        fields["sliding_window"] = config.sliding_window
    if family.window == "use_sliding_window":
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        fields["use_sliding_window"] = config.sliding_window is not None
        fields["max_window_layers"] = config.layers if config.sliding_window is None else 0
        fields["layer_types"] = [kind] * config.layers
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**before, **names, **fields, **_written_rotary(config, "rope_parameters" in before)}


def _written_rotary(config: LlamaConfig, in_one: bool) -> dict[str, Any]:
    scaling, rope = config.rotary_scaling, {}
    if isinstance(scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        own = {key: getattr(scaling, ours) for key, ours in LLAMA3.items()}
        rope = {"rope_type": "llama3", "factor": scaling.factor, **own}
    if in_one:
        return {"rope_parameters": {"rope_type": "default", **rope, "rope_theta": config.rotary_base}}
    return {"rope_theta": config.rotary_base, "rope_scaling": rope or None}
