"""`config.json` to `LlamaConfig`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
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
ONLY = {"mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
LOCAL_BASE = "rope_local_base_freq"  # of layers with a window
LARGEST = 2**31 - 1  # of a size
FULL, SLIDING = "full_attention", "sliding_attention"
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
        if not isinstance(size := given.get(key), int) or not 0 < size <= LARGEST:
            raise UserError(
                f"{place}: {key} is {size!r}; it has to be there, and a whole number from 1 to {LARGEST:,}."
            )
    for key, only in (ONLY | dict(family.only)).items():
        if given.get(key, only) not in (only, None):
            raise UserError(f"{place}: {key} is {given[key]!r}; Gregale computes models whose {key} is {only!r}.")
    for key in family.ignored:
        if given.get(key) is not None:
            raise UserError(
                f"{place}: {key} is {given[key]!r}. transformers ignores it in a {family.model_type}, so this file "
                "describes one model and transformers computes another. Set it to null for the one of transformers."
            )
    _check_whole(given, place)
    try:
        fields = {ours: given[key] for key, ours in _plain_keys(family).items() if key in given}
        family.config(**fields)  # the number of layers is a sensible one before there is a list of them
        fields |= {**family.block, **_windows(given, family, place)}
        return family, family.config(**fields, **_rotary(given, family, fields["sliding_window"] is not None, place))
    except KeyedError as error:
        raise UserError(f"{place}: {error}") from None
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f"{place} is damaged: a number, or a part of the rotary scaling, is not what it has to be ({error})."
        ) from None


def _check_whole(given: Mapping[str, Any], place: str) -> None:
    """Raises `UserError` for a quantised model: whatever its tensors are, they are not the numbers to compute with."""
    if quantised := given.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UserError(
            f"{place}: quantization_config is there (quant_method {method!r}): a quantised model, which Gregale does "
            "not read. Take the model that it was made of; where the tool that quantised it made it whole again, take "
            "the key out."
        )


def _plain_keys(family: Family) -> dict[str, str]:
    """The keys whose values are those of our fields."""
    own = {key: ours for key, ours in family.keys.items() if key != LOCAL_BASE}
    return SIZES | OTHERS | own


def _rotary(given: Mapping[str, Any], family: Family, windows: bool, place: str) -> dict[str, Any]:
    """Bases and scaling: of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling`.

    The former may be by the kind of a layer, in a family where layers with a window may have a base of their own.

    - `windows`: whether some layers have one
    """
    new, old = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    rope, local = new or old, {"rope_theta": given.get(LOCAL_BASE)}
    if FULL in rope or SLIDING in rope:
        if LOCAL_BASE not in family.keys:
            raise UserError(f"{place}: rope_parameters are by kinds of layers, which no {family.model_type} has.")
        rope, local = (rope.get(FULL) or {}, {**local, **(rope.get(SLIDING) or {})})

    def said(rope: Mapping[str, Any]) -> dict[str, Any]:
        base = rope.get("rope_theta") or given.get("rope_theta") or 10000.0
        return {"rotary_base": float(base), "rotary_scaling": _scaling(rope, place)}

    found = said(rope)
    if new and old and said(old) != found:
        raise UserError(
            f"{place}: rope_parameters and rope_scaling are both there, and differ; take out what does not hold."
        )
    if not windows or LOCAL_BASE not in family.keys or local["rope_theta"] is None:
        return found
    local_base, local_scaling = float(local["rope_theta"]), _scaling(local, place)
    if {"rotary_base": local_base, "rotary_scaling": local_scaling} == found:
        return found
    if local_scaling is not None:
        raise UserError(f"{place}: layers with a window have a rotary scaling of their own; Gregale has none there.")
    return {**found, "window_rotary_base": local_base}


def _scaling(rope: Mapping[str, Any], place: str) -> RotaryScaling | None:
    if (part := rope.get("partial_rotary_factor")) not in (1.0, None):
        raise UserError(f"{place}: partial_rotary_factor is {part!r}; Gregale turns all of a head, 1.0.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        return Llama3Scaling(factor=float(rope["factor"]), **{ours: rope[key] for key, ours in LLAMA3.items()})
    raise UserError(f"{place}: the rotary scaling is of type {kind!r}; Gregale has default, linear and llama3.")


def _windows(given: Mapping[str, Any], family: Family, place: str) -> dict[str, Any]:
    """The sliding window, and the layers without it."""
    none = {"sliding_window": None, "full_layers": ()}
    window = given.get("sliding_window") if family.window is not None and given.get(family.window) else None
    kinds = given.get("layer_types") if family.has_layer_types else None
    if window is None and kinds is None and family.full_every is None:
        return none
    kinds = _layer_types(given, family) if kinds is None else kinds
    if len(kinds) != given["num_hidden_layers"] or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(
            f"{place}: layer_types has {len(kinds)} entries ({', '.join(sorted(map(str, set(kinds))))}); it needs one "
            f"for each of the {given['num_hidden_layers']} layers, and Gregale computes {FULL} and {SLIDING}."
        )
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if len(full) == len(kinds):
        return none
    if window is None:
        raise UserError(f"{place}: layers are {SLIDING}, but there is no sliding_window, or it is not used.")
    return {"sliding_window": window, "full_layers": full}


def _layer_types(given: Mapping[str, Any], family: Family) -> list[str]:
    """What transformers takes for the `layer_types` of an older config.json, which has a rule in their place."""
    every = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", family.full_every))
    first = given.get("max_window_layers", 28) if family.window == "use_sliding_window" else 0

    def is_full(layer: int) -> bool:
        return layer < first or (family.full_every is not None and (layer + 1) % every == 0)

    return [FULL if is_full(layer) else SLIDING for layer in range(given["num_hidden_layers"])]


def written_config(config: LlamaConfig, family: Family, vocabulary: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model.

    Arguments:
    - `family`: one that can say it
    - `vocabulary`: rows of the embedding
    - `before`: the config.json that the model came with; keys that say nothing of its shape stay, and so does the form
      in which it says the rotary frequencies
    """
    fields = {key: getattr(config, ours) for key, ours in _plain_keys(family).items()}
    fields |= {
        "vocab_size": vocabulary,
        "num_key_value_heads": config.KvHeads.size,
        "head_dim": config.HeadSize.size,
        **family.only,
        **dict.fromkeys(family.ignored),
    }
    if "query_pre_attn_scalar" in fields:
        width = config.score_width or config.HeadSize.size
        fields["query_pre_attn_scalar"] = int(width) if width == int(width) else width
    fields |= _written_windows(config, family)
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**before, **names, **fields, **_written_rotary(config, family, "rope_parameters" in before)}


def _written_windows(config: LlamaConfig, family: Family) -> dict[str, Any]:
    if family.window is None:
        return {}
    window, full = config.sliding_window, config.full_layers
    fields: dict[str, Any] = {"sliding_window": window}
    if window is None and family.full_every is not None:  # transformers wants a number, though no layer has a window
        fields["sliding_window"] = family.defaults["sliding_window"]
    if family.has_layer_types:
        fields["layer_types"] = [FULL if window is None or i in full else SLIDING for i in range(config.layers)]
    if family.window == "use_sliding_window":
        fields["use_sliding_window"] = window is not None
        fields["max_window_layers"] = config.layers if window is None else _first_sliding(full)
    return fields


def _first_sliding(full: tuple[int, ...]) -> int:
    """How many of the first layers see all tokens."""
    return next(layer for layer in count() if layer not in full)


def _written_rotary(config: LlamaConfig, family: Family, in_one: bool) -> dict[str, Any]:
    """As `before` said it: `in_one` place, or in `rope_theta` and `rope_scaling`."""
    scaling, rope = config.rotary_scaling, {}
    if isinstance(scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        own = {key: getattr(scaling, ours) for key, ours in LLAMA3.items()}
        rope = {"rope_type": "llama3", "factor": scaling.factor, **own}
    base, local_base = config.rotary_base, config.window_rotary_base
    whole = {"rope_type": "default", **rope, "rope_theta": base}
    apart = {"rope_theta": base, "rope_scaling": rope or None}
    if LOCAL_BASE not in family.keys:
        return {"rope_parameters": whole} if in_one else apart
    if in_one or (local_base is None and rope):
        local = whole if local_base is None else {"rope_type": "default", "rope_theta": local_base}
        return {"rope_parameters": {FULL: whole, SLIDING: local}}
    return {**apart, LOCAL_BASE: base if local_base is None else local_base}
