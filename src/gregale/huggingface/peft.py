"""Provides adapters in the format of PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from haliax import NamedArray

from gregale.axes.layout import LORA_RANK, Layout
from gregale.errors import UserError
from gregale.huggingface.families import Slot, parameters_of
from gregale.huggingface.folder import ADAPTER, check_files, read_json
from gregale.huggingface.safetensors import read_header
from gregale.huggingface.weights import read_slot
from gregale.model.config import AdapterConfig

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Keys of adapter_config.json that have to agree with the run's, with PEFT's defaults; keys that do not change what A
# and B compute (records, training alone, names that the tensors have); and valid values of keys that are not null,
# false or empty. Every other key has to be, also one of another version of PEFT.
COMPARED = {"peft_type": None, "r": 8, "lora_alpha": 8, "use_rslora": False}
FREE = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
VALID = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica")}
CONVERSION = (
    "PEFT changes the base with such adapters. Where they were trained, write plain ones with peft's `save_pretrained("
    "OTHER, path_initial_model_for_weight_conversion=INITIAL)`; or `AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
    ".merge_and_unload().save_pretrained(OTHER)` makes a model to import."
)


def adapter_slots(slots: list[Slot], model: Any) -> list[Slot]:
    """Return the slots of a model's adapters.

    - `slots`: of the model without adapters
    - `model`: with adapters; it may be abstract

    Raises `UserError` if matrices of experts have adapters.
    """
    leaves, found = parameters_of(model), []
    if of_experts := next((path for path in leaves if ".adapters." in path), None):
        raise UserError(
            f"adapter.targets: {of_experts} is of a matrix of each expert; Gregale neither reads nor writes these in "
            "PEFT's format. `gregale export` without --adapter writes the merged weights."
        )
    for slot in slots:
        path, hub = slot.path.removesuffix(".weight"), PREFIX + slot.hub.removesuffix(".weight")
        rank = (LORA_RANK,)
        for factor, groups in (("A", (rank, *slot.groups[1:])), ("B", (*slot.groups[:1], rank))):
            if (own := f"{path}.lora_{factor.lower()}.weight") in leaves:
                name = f"{hub}.lora_{factor}.weight"
                found.append(replace(slot, hub=name, path=own, axes=leaves[own].axes, groups=groups))
    return found


def adapter_settings(config: AdapterConfig, slots: list[Slot], base: str, has_experts: bool) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    - `slots`: of the adapters
    - `base`: the model that they are for
    - `has_experts`: names of modules need their parents, because experts have the same ones
    """
    modules = sorted({slot.hub.removeprefix(PREFIX).rsplit(".", 2)[0].partition("{layer}.")[2] for slot in slots})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        **config.peft(),
        "bias": "none",
        "target_modules": modules if has_experts else [name.rpartition(".")[2] for name in modules],
    }


def read_adapters(folder: Path, config: AdapterConfig, slots: list[Slot], model: Any, layout: Layout) -> dict[str, Any]:
    """Return the adapters of a folder by their paths, under `params`; `slots`, `model`: as for `adapter_slots`.

    Raises `UserError` if the folder has adapters of other targets or of another rank or scale.
    """
    check_files(folder, (ADAPTER, ADAPTER_WEIGHTS))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"adapter.start_from: {folder} has no {ADAPTER_WEIGHTS}: Gregale reads no pickles.")
    check_settings(read_json(folder / ADAPTER), config, str(folder / ADAPTER))
    tensors, leaves = read_header(folder / ADAPTER_WEIGHTS), parameters_of(model)
    wanted = {name: slot.shape for slot in slots for name in slot.tensors()}
    if (found := {name: tensor.shape for name, tensor in tensors.items()}) != wanted:
        name, shape = min({*found.items()} ^ {*wanted.items()})
        where = "is there, and not here" if name in found else "is missing"
        raise UserError(
            f"adapter.start_from: {folder} has adapters of other projections or sizes than adapter.targets: {name} "
            f"{list(shape)} {where}."
        )

    def read(slot: Slot) -> NamedArray:
        leaf = leaves[slot.path]
        return read_slot(slot, tensors, leaf, layout.sharding(leaf.axes, layout.params))

    return {slot.path: read(slot) for slot in slots}


def check_settings(found: Mapping[str, Any], config: AdapterConfig, source: str) -> None:
    """Raise `UserError` if adapters of a file compute other outputs than those of a configuration."""
    wanted = adapter_settings(config, [], "", False)
    for name, there in (COMPARED | dict(found)).items():
        valid = (wanted[name],) if name in COMPARED else (None, False, [], {}, *VALID.get(name, ()))
        advice = CONVERSION if name == "init_lora_weights" else f"Here it is {' or '.join(map(repr, valid))}."
        if name not in FREE and there not in valid:
            raise UserError(f"adapter.start_from: {name} is {there!r} in {source}. {advice}")
