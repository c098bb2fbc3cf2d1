"""Provides the conversion of `config.json` to `LlamaConfig`, and back."""

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

from gregale.errors import KeyedError, UserError
from gregale.huggingface.families import FAMILIES, Family, family_of
from gregale.model.config import LlamaConfig
from gregale.model.scaling import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling

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
LOCAL_BASE = "rope_local_base_freq"  # base of layers with a window
MAX_SIZE = 2**31 - 1
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}

YARN = {
    "beta_fast": "fast_turns",
    "beta_slow": "slow_turns",
    "original_max_position_embeddings": "original_context",
    "attention_factor": "attention_factor",
    "truncate": "whole_channels",
}


def read_config(saved: Mapping[str, Any], source: str) -> tuple[Family, LlamaConfig]:
    """Return the family and the configuration that a config.json describes.

    - `saved`: its content
    - `source`: its path, for messages

    Raises `UserError` for another family, a missing size, quantised weights, and settings that a `LlamaConfig` lacks.
    """
    family = family_of(saved, source)
    given = {**DEFAULTS, **family.defaults, **saved}
    given = {**{key: saved[other] for other, key in family.synonyms.items() if other in saved}, **given}
    for key in (*SIZES, *(family.experts.sizes if family.experts else ())):
        if not isinstance(size := given.get(key), int) or not 0 < size <= MAX_SIZE:
            raise UserError(
                f"{source}: {key} is {size!r}; it has to be there, and a whole number from 1 to {MAX_SIZE:,}."
            )
    for key, only in (ONLY | dict(family.only)).items():
        if key not in family.keys and given.get(key, only) not in (only, None, family.legacy.get(key)):
            raise UserError(f"{source}: {key} is {given[key]!r}; Gregale computes models whose {key} is {only!r}.")
    for key in family.ignored:
        if given.get(key) is not None:
            raise UserError(
                f"{source}: {key} is {given[key]!r}. transformers ignores it in a {family.model_type}, so this file "
                "describes one model and transformers computes another. Set it to null for the one of transformers."
            )
    if quantised := given.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        if method is None or method != family.packing:
            raise UserError(
                f"{source}: quantization_config is set (quant_method {method!r}): Gregale does not read quantised "
                "models but a gpt_oss in mxfp4. Use the original model. If the tool that quantised the model has "
                "restored its weights, remove the key."
            )
    try:
        fields = {ours: given[key] for key, ours in _plain_keys(family).items() if key in given}
        family.config(**fields)  # checks the number of layers before the list of layers is made
        fields |= {**family.block, **_windows(given, family, source)}
        fields |= family.experts.read(given, source) if family.experts else {}
        return family, family.config(**fields, **_rotary(given, family, fields["sliding_window"] is not None, source))
    except KeyedError as error:
        raise UserError(f"{source}: {error}") from None
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f"{source} is damaged: a number, or a part of the rotary scaling, is not what it has to be ({error})."
        ) from None


def text_part(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text part of a model of several parts, and other ones as they are."""
    whole, text = saved.get("model_type"), saved.get("text_config")
    family = next((each for each in FAMILIES.values() if whole in each.part_of), None)
    if family is None or not isinstance(text, dict):
        return saved
    # Of all parts: the dtype and the special tokens, which either of both may say, and whether the head is a tensor.
    shared = {key: saved[key] for key in ("dtype", "torch_dtype", *IDS) if key in saved}
    tied = {key: saved[key] for key in ("tie_word_embeddings",) if key in saved}
    return {**shared, "model_type": family.model_type, **text, **tied, "architectures": [family.architecture]}


def _plain_keys(family: Family) -> dict[str, str]:
    """Return the keys whose values are field values, with the names of the fields."""
    own = {key: ours for key, ours in family.keys.items() if key != LOCAL_BASE}
    return SIZES | OTHERS | own


def _rotary(given: Mapping[str, Any], family: Family, windows: bool, source: str) -> dict[str, Any]:
    """Return bases and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

    `rope_parameters` may be by kind of layer, in a family whose layers with a window may have a separate base.

    - `windows`: whether some layers have a window
    """
    new, old = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    new = new if new or old else family.rotary
    rope, local = new or old, {"rope_theta": given.get(LOCAL_BASE)}
    if FULL in rope or SLIDING in rope:
        if not family.rotary_kinds:
            raise UserError(f"{source}: rope_parameters are by kinds of layers, which no {family.model_type} has.")
        rope, local = (rope.get(FULL) or {}, {**local, **(rope.get(SLIDING) or {})})

    def fields_of(rope: Mapping[str, Any]) -> dict[str, Any]:
        base = rope.get("rope_theta") or given.get("rope_theta") or 10000.0
        return {"rotary_base": float(base), "rotary_scaling": _scaling(rope, source)}

    found = fields_of(rope)
    if new and old and fields_of(old) != found:
        raise UserError(f"{source}: rope_parameters and rope_scaling are both set, and differ; remove the wrong one.")
    if not windows or not family.rotary_kinds or local["rope_theta"] is None:
        return found
    local_base, local_scaling = float(local["rope_theta"]), _scaling(local, source)
    if {"rotary_base": local_base, "rotary_scaling": local_scaling} == found:
        return found
    if local_scaling is not None:
        raise UserError(f"{source}: layers with a window have a rotary scaling of their own; Gregale has none there.")
    return {**found, "window_rotary_base": local_base}


def _scaling(rope: Mapping[str, Any], source: str) -> RotaryScaling | None:
    if (part := rope.get("partial_rotary_factor")) not in (1.0, None):
        raise UserError(f"{source}: partial_rotary_factor is {part!r}; Gregale rotates the whole head, 1.0.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        return Llama3Scaling(factor=float(rope["factor"]), **{ours: rope[key] for key, ours in LLAMA3.items()})
    if kind == "yarn":
        return _yarn(rope)
    hint = " Up to max_position_embeddings tokens it is that of none: remove it, if you need no longer texts."
    raise UserError(
        f"{source}: the rotary scaling is of type {kind!r}; Gregale has default, linear, llama3 and yarn."
        f"{hint if kind == 'dynamic' else ''}"
    )


def _yarn(rope: Mapping[str, Any]) -> YarnScaling:
    """Return YaRN's scaling; the attention factor may be given by two factors of the logarithm."""
    found = {ours: rope[key] for key, ours in YARN.items() if rope.get(key) is not None}
    factor, scales = float(rope["factor"]), [rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim")]
    if all(scales) and "attention_factor" not in found:
        above, below = (1 + 0.1 * float(scale) * math.log(max(factor, 1)) for scale in scales)
        found["attention_factor"] = above / below
    return YarnScaling(factor=factor, **{"original_context": rope["original_max_position_embeddings"], **found})


def _windows(given: Mapping[str, Any], family: Family, source: str) -> dict[str, Any]:
    none = {"sliding_window": None, "full_layers": ()}
    window = given.get("sliding_window") if family.window is not None and given.get(family.window) else None
    kinds = given.get("layer_types") if family.has_layer_types else None
    if window is None and kinds is None and family.full_every is None:
        return none
    if kinds is None and not family.derives_layer_types:
        raise UserError(
            f"{source} has no layer_types, and versions of transformers differ in which layers have windows."
        )
    kinds = _layer_types(given, family) if kinds is None else kinds
    if len(kinds) != given["num_hidden_layers"] or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(
            f"{source}: layer_types has {len(kinds)} entries ({', '.join(sorted(map(str, set(kinds))))}); it needs one "
            f"for each of the {given['num_hidden_layers']} layers, and Gregale computes {FULL} and {SLIDING}."
        )
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if len(full) == len(kinds):
        return none
    if window is None:
        raise UserError(f"{source}: layers are {SLIDING}, but there is no sliding_window, or it is not used.")
    return {"sliding_window": window, "full_layers": full}


def _layer_types(given: Mapping[str, Any], family: Family) -> list[str]:
    """Return the `layer_types` that transformers derives for an older config.json, which has a rule instead."""
    every = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", family.full_every))
    first = 0 if family.first_full is None else given.get("max_window_layers", family.first_full)

    def is_full(layer: int) -> bool:
        return layer < first or (bool(family.full_every) and (layer - family.full_at) % every == 0)

    return [FULL if is_full(layer) else SLIDING for layer in range(given["num_hidden_layers"])]


def written_config(config: LlamaConfig, family: Family, vocabulary: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model.

    - `family`: a family that supports the model
    - `vocabulary`: rows of the embedding
    - `before`: the imported config.json; the result keeps its keys that do not affect the shape, and its format of the
      rotary frequencies
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
    fields |= _written_windows(config, family) | (family.experts.written(config) if family.experts else {})
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**before, **names, **fields, **_written_rotary(config, family, before)}


def _written_windows(config: LlamaConfig, family: Family) -> dict[str, Any]:
    window, full = config.sliding_window if family.window else None, config.full_layers
    fields: dict[str, Any] = {} if family.window is None else {"sliding_window": window}
    if window is None and family.window and family.full_every is not None:  # transformers requires a number
        fields["sliding_window"] = family.defaults["sliding_window"]
    if family.has_layer_types:
        fields["layer_types"] = [FULL if window is None or i in full else SLIDING for i in range(config.layers)]
    if family.window == "use_sliding_window":
        fields["use_sliding_window"] = window is not None
    if family.first_full is not None:
        first = next(layer for layer in count() if layer not in full)  # with a window
        fields["max_window_layers"] = config.layers if window is None else first
    return fields


def _written_rotary(config: LlamaConfig, family: Family, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys: `rope_parameters` if `before` has it, else `rope_theta` and `rope_scaling`."""
    scaling, rope = config.rotary_scaling, {}
    if isinstance(scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        own = {key: getattr(scaling, ours) for key, ours in LLAMA3.items()}
        rope = {"rope_type": "llama3", "factor": scaling.factor, **own}
    elif isinstance(scaling, YarnScaling):
        own = {key: value for key, ours in YARN.items() if (value := getattr(scaling, ours)) is not None}
        if own["truncate"]:  # transformers' default, which its own files leave out
            del own["truncate"]
        rope = {"rope_type": "yarn", "factor": scaling.factor, **own}
    base, local_base = config.rotary_base, config.window_rotary_base
    whole = {"rope_type": "default", **rope, "rope_theta": base}
    apart = {"rope_theta": base, "rope_scaling": rope or None}
    in_one, old = "rope_parameters" in before, {key: apart[key] for key in apart if key in before}
    if not family.rotary_kinds:
        return {**old, "rope_parameters": whole} if in_one or family.rotary else apart
    local = whole if local_base is None else {"rope_type": "default", "rope_theta": local_base}
    kinds = {**old, "rope_parameters": {FULL: whole, SLIDING: local}}
    if in_one or (local_base is None and rope):
        return kinds
    if LOCAL_BASE not in family.keys:  # the first two are for older versions
        return {**apart, **kinds}
    return {**apart, LOCAL_BASE: base if local_base is None else local_base}
