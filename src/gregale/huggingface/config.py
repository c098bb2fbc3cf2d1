"""The `config.json` of transformers: a model's configuration from it, and back.

The proof is by settings: an import of the exported config.json has to give a configuration that computes the same, and
a model whose modules have the same settings.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from inspect import get_annotations
from itertools import count
from typing import Any

import equinox as eqx
import jax
from haliax import Axis

from gregale.axes.layout import is_named
from gregale.axes.parameters import buffers_of
from gregale.errors import UserError
from gregale.huggingface.families import FAMILIES, Family, TypedJson, family_of, parameters_of
from gregale.model.config import ExpertsConfig, LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from gregale.model.llama import LlamaConfig
from gregale.settings import Settings, at_least, shortened, whole
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


NEAREST = 3  # families that a message names
# Settings without an effect on outputs but for their rounding, and those whose effect the shapes of weights show.
UNCOMPARED = {"z_loss", "init_scale", "parametrisation", "splits_positions", "vocabulary", "row_multiple"}
UNCOMPARED |= {"mlp", "kind_numbers", "experts.balance", "experts.router", "full_layers", "window_rotary_base"}


def exported_family(base: Any, config: LlamaConfig, Vocab: Axis, before: Mapping[str, Any]) -> Family:
    """Return the family as which a model is written; raise `UserError` if other programs may compute other outputs.

    - `base`: the model, which may be abstract
    - `before`: the imported config.json; empty for a model that was not imported
    """
    family = family_that_has(config, before)
    twin = jax.eval_shape(partial(read_again(config, family, before).init, Vocab), jax.random.key(0))
    _check_part(base, twin, family, "the model")
    buffers = parameters_of(buffers_of(base)).keys()
    ours, theirs = ({path: leaf.axes for path, leaf in parameters_of(each).items()} for each in (base, twin))
    for path in sorted((ours.keys() | theirs.keys()) - buffers):
        if ours.get(path) != theirs.get(path):
            axes = [str(each.get(path, "none")) for each in (ours, theirs)]
            raise UserError(
                f"model: {path} is {axes[0]}, and {axes[1]} in a {family.model_type}, so that nothing could load it."
            )
    return family


def family_that_has(config: LlamaConfig, before: Mapping[str, Any] = {}) -> Family:
    """Return a family that supports a configuration, that of `before` if possible; raise `UserError` if none does."""
    lacks: dict[str, list[str]] = {}
    preferred = before.get("model_type")
    for family in sorted(
        FAMILIES.values(), key=lambda each: (each.model_type != preferred, type(config) is not each.config)
    ):
        lacks[family.model_type] = lacking(config, family, before)
        if not lacks[family.model_type]:
            return family
    same = [name for name in lacks if (FAMILIES[name].experts is None) == (config.experts is None)]
    nearest = sorted(same, key=lambda name: (name != preferred, len(lacks[name])))[:NEAREST]
    text = "; ".join(f"{name} not {', '.join(lacks[name])}" for name in nearest)
    raise UserError(
        f"model: no family of transformers has this block, so that nothing could load it (the nearest ones: {text})."
    )


def lacking(config: LlamaConfig, family: Family, before: Mapping[str, Any] = {}) -> list[str]:
    """Return the settings of a model that a family does not have: `model.norms after`.

    They are those that differ when the family's config.json is read back.
    """
    if (family.experts is None) != (config.experts is None):
        return ["model.experts" if family.experts is None else "model.experts null"]
    if not (isinstance(config, family.config) or _is_known(family.config)):
        return [f"model.type {config.get_choice_name(type(config))}"]
    found = [] if family.any_heads or config.hidden % config.heads == 0 else [f"model.heads {config.heads}"]
    if config.heads * config.HeadSize.size != config.hidden and not family.any_head_size:
        found.append(f"model.head_size {config.HeadSize.size}")
    try:
        return found + differing(config, read_again(config, family, before))
    except UserError as error:
        return found or [str(error)]


def read_again(config: LlamaConfig, family: Family, before: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration that an import of the exported config.json has."""
    return read_config(written_config(config, family, config.vocabulary or 1, before), "config.json")[1]


def differing(config: LlamaConfig, other: LlamaConfig) -> list[str]:
    """Return the settings by which two configurations compute other outputs, with their values; empty if none do."""
    own = [each.name for each in fields(config)] if type(config) is type(other) else []
    ours, theirs = _meaning(config, own), _meaning(other, own)
    return [f"model.{name} {_shown(ours[name], theirs.get(name))}" for name in ours if ours[name] != theirs.get(name)]


def _shown(value: Any, other: Any) -> str:
    """Return a value for a message; of a list for all layers, that of the first layer that differs."""
    if not isinstance(value, list):
        return shortened(value.__qualname__ if isinstance(value, type) else str(value))
    layer = next(layer for layer, each in enumerate(value) if [each] != other[layer : layer + 1])
    return f"{_shown(value[layer], None)} in layer {layer}"


def _meaning(config: LlamaConfig, own: list[str]) -> dict[str, Any]:
    """Return what layers compute with, by the names of settings; `own`: fields that not all models have."""
    experts, layers = config.experts, [config.kinds[number] for number in config.kind_numbers]
    classes = [each for each in reversed(LlamaConfig.__mro__) if each is not Settings]  # which has no setting itself
    names = [name for cls in classes for name in get_annotations(cls)]
    found = {name: getattr(config, name) for name in dict.fromkeys([*names, *own]) if name[0] != "_"}
    found |= {f"experts.{each.name}": getattr(experts, each.name) for each in fields(ExpertsConfig) if experts}
    found |= {
        "kv_heads": config.KvHeads.size,
        "head_size": config.HeadSize.size,
        "score_width": config.score_width or config.HeadSize.size,
        "logits": config.logits.cap,
        "experts": type(experts),
        "experts.balance.bias": experts is not None and experts.balance.bias,
        "sliding_window": [each.window for each in layers],
        "rotary_base": [each.rotary_base for each in layers],
        "rotary_scaling": [each.rotary_scaling for each in layers],
        "kinds": [type(each) for each in layers],
        "structure_numbers": list(config.structure_numbers),
    }
    return {name: value for name, value in found.items() if name not in UNCOMPARED}


def _check_part(found: Any, twin: Any, family: Family, place: str) -> None:
    """Raise `UserError` if a part of a model may compute other outputs than that of the family, its twin.

    A class outside of Gregale and Haliax has to say that it does not, itself: a subclass of it may differ again.
    """
    kind, wanted = type(found), type(twin)
    if is_named(twin):
        return
    if isinstance(twin, eqx.Module):
        if kind is not wanted and _is_known(kind):
            raise UserError(f"{place} is a {kind.__name__}, and in a {family.model_type} it is a {wanted.__name__}.")
        if kind is not wanted and not vars(kind).get("exports_as_llama"):
            raise UserError(
                f"the model has a {kind.__name__}, a class of your own, so that other programs may compute other "
                "outputs from its weights. If only its loss differs, write `exports_as_llama = True` into the body of "
                f"{kind.__name__}."
            )
        for name in [each for each in vars(twin) if each in vars(found)]:
            _check_part(vars(found)[name], vars(twin)[name], family, f"{place}.{name}")
        return
    if isinstance(twin, list) and isinstance(found, list) and len(found) == len(twin):
        for number, pair in enumerate(zip(found, twin, strict=True)):
            _check_part(*pair, family, f"{place}.{number}")
        return
    if isinstance(twin, LlamaConfig) and isinstance(found, LlamaConfig):
        lacks = differing(found, twin)
    else:
        lacks = [] if found == twin else [f"{shortened(str(found))} and not {shortened(str(twin))}"]
    if lacks:
        raise UserError(f"{place} is not that of a {family.model_type}: {', '.join(lacks)}.")


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("gregale", "haliax", "builtins")
