"""Provides the check that other programs compute the same outputs from a model's weights.

The proof is by settings: an import of the exported config.json has to give a configuration that computes the same, and
a model whose modules have the same settings.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from inspect import get_annotations
from typing import Any

import equinox as eqx
import jax
from haliax import Axis

from gregale.axes.layout import is_named
from gregale.axes.parameters import buffers_of
from gregale.errors import UserError
from gregale.huggingface.config import read_config, written_config
from gregale.huggingface.families import FAMILIES, Family
from gregale.huggingface.tensor_names import parameters_of
from gregale.model.config import ExpertsConfig
from gregale.model.llama import LlamaConfig
from gregale.settings import Settings, shortened

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
