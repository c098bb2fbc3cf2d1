"""Provides the conversion of `config.json` to `LlamaConfig`, and back."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from typing import Any

from gregale.errors import UserError
from gregale.huggingface.families import FAMILIES, Family, family_of
from gregale.huggingface.typed_json import TypedJson
from gregale.model.config import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from gregale.model.llama import LlamaConfig
from gregale.settings import at_least, whole
from gregale.settings.decoding import types_of

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
DERIVED = ("num_key_value_heads", "head_dim")  # from other sizes, if they are null
LOCAL_BASE = "rope_local_base_freq"  # base of layers with a window
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS: dict[str, type[RotaryScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
OPTIONAL = ("fast_turns", "slow_turns", "attention_factor", "whole_channels")  # fields of scalings


def read_config(saved: Mapping[str, Any], source: str) -> tuple[Family, LlamaConfig]:
    """Return the family and the configuration that a config.json describes.

    - `saved`: its content
    - `source`: its path, for messages

    Raises `UserError` for another family, a missing size, quantised weights, and settings that a `LlamaConfig` lacks.
    """
    family = family_of(saved, source)
    synonyms = {key: saved[other] for other, key in family.synonyms.items() if other in saved}
    defaults = {**DEFAULTS, **family.defaults}
    given = TypedJson({**synonyms, **defaults, **saved}, source, defaults)
    for key in (*SIZES, *(family.experts.sizes if family.experts else ())):
        given.read(key, int, valid=whole(1))
    for key, only in (ONLY | dict(family.only)).items():
        value = given.content.get(key, only)
        if key not in family.keys and value not in (only, None, family.legacy.get(key)):
            raise given.error(f"{key} is {value!r}; Gregale computes models whose {key} is {only!r}.")
    for key in family.ignored:
        if (value := given.content.get(key)) is not None:
            raise given.error(
                f"{key} is {value!r}. transformers ignores it in a {family.model_type}, so this file "
                "describes one model and transformers computes another. Set it to null for the one of transformers."
            )
    if quantised := given.below("quantization_config").content:
        method = quantised.get("quant_method")
        if method is None or method != family.packing:
            raise given.error(
                f"quantization_config is set (quant_method {method!r}): Gregale does not read quantised "
                "models but a gpt_oss in mxfp4. Use the original model. If the tool that quantised the model has "
                "restored its weights, remove the key."
            )
    kinds, keys = types_of(family.config), _plain_keys(family)
    try:
        found = {ours: given.read(key, kinds[ours], getattr(family.config, ours)) for key, ours in keys.items()}
        family.config(**found)  # checks the number of layers before the list of layers is made
        found |= {**family.block, **_windows(given, family)}
        found |= family.experts.read(given) if family.experts else {}
        return family, family.config(**found, **_rotary(given, family, found["sliding_window"] is not None))
    except UserError as error:  # of a configuration class, which does not know the file
        raise error if str(error).startswith(source) else UserError(f"{source}: {error}") from None


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


def _rotary(given: TypedJson, family: Family, windows: bool) -> dict[str, Any]:
    """Return bases and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

    `rope_parameters` may be by kind of layer, in a family whose layers with a window may have a separate base.

    - `windows`: whether some layers have a window
    """
    new, old = given.below("rope_parameters"), given.below("rope_scaling")
    new = new if new.content or old.content else replace(new, content=family.rotary)
    rope, local = new if new.content else old, TypedJson({}, given.source)
    if FULL in rope.content or SLIDING in rope.content:
        if not family.rotary_kinds:
            raise given.error(f"rope_parameters are by kinds of layers, which no {family.model_type} has.")
        rope, local = rope.below(FULL), rope.below(SLIDING)

    def fields_of(rope: TypedJson) -> dict[str, Any]:
        base = rope.read("rope_theta", float, given.read("rope_theta", float, 10000.0))
        return {"rotary_base": base, "rotary_scaling": _scaling(rope)}

    found = fields_of(rope)
    if new.content and old.content and fields_of(old) != found:
        raise given.error("rope_parameters and rope_scaling are both set, and differ; remove the wrong one.")
    if not windows or not family.rotary_kinds:
        return found
    local_base, local_scaling = local.read("rope_theta", float, given.read(LOCAL_BASE, float, None)), _scaling(local)
    if local_base is None or {"rotary_base": local_base, "rotary_scaling": local_scaling} == found:
        return found
    if local_scaling is not None:
        raise given.error("layers with a window have a rotary scaling of their own; Gregale has none there.")
    return {**found, "window_rotary_base": local_base}


def _scaling(rope: TypedJson) -> RotaryScaling | None:
    """Return the scaling of rotary frequencies; the attention factor may be given by two factors of the logarithm."""
    if (part := rope.read("partial_rotary_factor", float, 1.0)) != 1:
        raise rope.error(f"partial_rotary_factor is {part!r}; Gregale rotates the whole head, 1.0.")
    kind = rope.read("rope_type", str, rope.read("type", str, "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        hint = " Up to max_position_embeddings tokens it is that of none: remove it, if you need no longer texts."
        raise rope.error(
            f"the rotary scaling is of type {kind!r}; Gregale has default, {', '.join(SCALINGS)}."
            f"{hint if kind == 'dynamic' else ''}"
        )
    types, given = types_of(SCALINGS[kind]), {}
    for key, ours in _keys_of(SCALINGS[kind]).items():
        given[ours] = rope.read(key, types[ours], None if ours in OPTIONAL else ...)
    scales = [rope.read(key, float, None, at_least(0)) for key in ("mscale", "mscale_all_dim")]
    if all(scales) and given.get("attention_factor", 0) is None:
        upper, lower = (1 + 0.1 * scale * math.log(max(given["factor"], 1)) for scale in scales if scale)
        given["attention_factor"] = upper / lower
    return SCALINGS[kind](**{ours: value for ours, value in given.items() if value is not None})


def _keys_of(scaling: type[RotaryScaling]) -> dict[str, str]:
    """Return the keys of a scaling with its fields, whose first aliases they are."""
    return {(*each.metadata.get("aliases", ()), each.name)[0]: each.name for each in fields(scaling)}


def _windows(given: TypedJson, family: Family) -> dict[str, Any]:
    none = {"sliding_window": None, "full_layers": ()}
    has_windows = family.window == "sliding_window" or (family.window and given.read(family.window, bool, False))
    window = given.read("sliding_window", int | None, None, whole(0)) if has_windows else None
    kinds = given.read("layer_types", list[str], None) if family.has_layer_types else None
    if window is None and kinds is None and (family.full_every is None or family.window is None):
        return none
    if kinds is None and not family.derives_layer_types:
        raise given.error("it has no layer_types, and versions of transformers differ in which layers have windows.")
    layers = given.read("num_hidden_layers", int)
    kinds = _layer_types(given, family, layers) if kinds is None else kinds
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise given.error(
            f"layer_types has {len(kinds)} entries ({', '.join(sorted(set(kinds)))}); it needs one "
            f"for each of the {layers} layers, and Gregale computes {FULL} and {SLIDING}."
        )
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if len(full) == len(kinds):
        return none
    if window is None:
        raise given.error(f"layers are {SLIDING}, but there is no sliding_window, or it is not used.")
    if window == 0:
        raise given.error(
            f"layers are {SLIDING}, and sliding_window is 0, with which transformers lets a token see none. If the "
            "model has no windows, set it to null."
        )
    return {"sliding_window": window, "full_layers": full}


def _layer_types(given: TypedJson, family: Family, layers: int) -> list[str]:
    """Return the `layer_types` that transformers derives for an older config.json, which has a rule instead."""
    every, first = given.read("_sliding_window_pattern", int, family.full_every, whole(1)), family.first_full
    every = given.read("sliding_window_pattern", int, every, whole(1)) if family.full_every else None
    first, at = 0 if first is None else given.read("max_window_layers", int, first, whole(0)), family.full_at
    return [FULL if layer < first or (every and (layer - at) % every == 0) else SLIDING for layer in range(layers)]


def written_config(config: LlamaConfig, family: Family, vocabulary: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model.

    - `family`: a family that supports the model
    - `vocabulary`: rows of the embedding
    - `before`: the imported config.json; the result keeps its keys that do not affect the shape, and its format of the
      rotary frequencies. If it describes this model, the result keeps all of its keys: several forms mean the same.
      Only null and whole floats become numbers where transformers 5 refuses them
    """
    fields = _written_fields(config, family, vocabulary, before)
    with suppress(UserError):  # of another model
        own, there = read_config(before, "config.json")
        if own == family and _written_fields(there, family, there.vocabulary, before) == fields:
            return {**before, **_strict(fields, before, family), "architectures": [family.architecture]}
    return {**before, **fields, "model_type": family.model_type, "architectures": [family.architecture]}


def _strict(fields: Mapping[str, Any], before: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields that are numbers or truth values, and null or floats in a file that transformers 5 refuses."""
    null = {key for key in before if before[key] is None} - {*DERIVED, *family.only}
    numbers = {key: value for key, value in fields.items() if isinstance(value, bool | int | float)}
    floats = {key for key, value in numbers.items() if (type(before.get(key)), type(value)) == (float, int)}
    return {key: value for key, value in numbers.items() if key in null | floats}


def _written_fields(
    config: LlamaConfig, family: Family, vocabulary: int | None, before: Mapping[str, Any]
) -> dict[str, Any]:
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
    return fields | _written_rotary(config, family, before)


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
    if scaling is not None and type(scaling) in SCALINGS.values():
        own = {key: getattr(scaling, ours) for key, ours in _keys_of(type(scaling)).items()}
        own = {"rope_type": scaling.get_choice_name(type(scaling)), **own}
        rope = {key: value for key, value in own.items() if (key, value) != ("truncate", True) and value is not None}
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
