"""Provides what a configuration leaves out of `model` and `batch`: the model to start from, and sizes for CPU devices.

A step of the usual default sizes takes minutes and 25 GB on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, replace
from math import lcm
from typing import Any

import jax

from gregale.axes.layout import Device, make_mesh
from gregale.data.tokenizers import fewest_tokens
from gregale.errors import UserError, below
from gregale.model.llama import LlamaConfig, ModelConfig
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import rows_multiple
from gregale.programs.runtime.trained_model import find_origin
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.settings import Settings
from gregale.settings.decoding import TYPE

MODEL, BATCH = "model", "batch"
SMALL: Mapping[str, Any] = {
    MODEL: LlamaConfig(layers=4, hidden=256, heads=4, mlp=704),
    BATCH: BatchConfig(size=16, sequence_length=256),
}
WIDTHS = {"hidden", "heads", "mlp"}
ALL_WIDTHS = WIDTHS | {"kv_heads", "head_size"}  # each has to suit the others
OF_ORIGIN = "The configuration leaves out keys of `model`, which are those of {}: {}."
USUAL = {each.name: each.default for each in fields(TrainConfig)}  # a configuration without a section has this object


def with_what_is_left_out(
    config: TrainConfig, continued: RunDirectory | None, origin: RunDirectory | None
) -> tuple[TrainConfig, Sequence[str | None]]:
    """Return a configuration with what it leaves out of `model` and `batch`, and notes of that.

    - `continued`: the run whose model and sizes stay, because its checkpoint goes on; None: the run is a new one
    - `origin`: of `start_from`, if the run is a new one
    """
    begun, source = None if continued is None else continued.read_config(), continued or origin
    given, devices = config, jax.devices()[: config.cpu_devices]
    if config.start_from is not None and source is not None:
        config = with_model_of(config, source.config_at().model if begun is None else begun.model, begun is None)
    sized, note = with_default_sizes(config, devices, lambda each: fewest_tokens(each.data.tokenizer), begun)
    keys = "; ".join(map(str, changes(given, config)))
    return sized, (OF_ORIGIN.format(source.path, keys) if keys and source is not None else None, note)


def with_origin_model(config: TrainConfig) -> tuple[TrainConfig, str | None]:
    """Return `with_model_of` the run or imported model of `start_from`, and a note; raise `UserError` without one."""
    origin = find_origin(config.start_from)
    found = with_model_of(config, origin.config_at().model, is_new=True)
    keys = "; ".join(map(str, changes(config, found)))
    return found, OF_ORIGIN.format(origin.path, keys) if keys else None


def with_model_of(config: TrainConfig, theirs: ModelConfig, is_new: bool) -> TrainConfig:
    """Return a configuration with the keys of another model that its `model` leaves out.

    A model of another `type` keeps its own defaults.

    - `is_new`: whether the run has rates of its own, without those of `model.parametrisation`
    """
    theirs = replace(theirs, **dict.fromkeys(theirs.keys_of_rates)) if is_new else theirs
    with below(MODEL):
        return replace(
            config, model=replace(theirs) if config.model is USUAL[MODEL] else completed(config.model, theirs)
        )


def completed(given: Any, base: Any) -> Any:
    """Return `base` with the keys that a section gives; a section of another `type` stays as it is."""
    kind = type(given)
    if not issubclass(kind, Settings) or not issubclass(type(base), kind):
        return given
    if kind is not type(base) and TYPE not in given.left_out:
        return given
    names = {each.name for each in fields(given)} - given.left_out
    return replace(base, **{name: completed(getattr(given, name), getattr(base, name)) for name in names})


def with_default_sizes(
    config: TrainConfig,
    devices: Sequence[Device],
    tokens: Callable[[TrainConfig], int],
    begun: TrainConfig | None = None,
) -> tuple[TrainConfig, str | None]:
    """Return a configuration with sizes for the keys that it leaves out, and a note of them.

    - `devices`: those of the run; CPU devices have the sizes of `SMALL`
    - `tokens`: returns the number of the tokenizer's ids
    - `begun`: the configuration of a run that goes on, whose sizes stay on any devices
    """
    wanted = [name for name in SMALL if sizes_left_out(config, name)]
    if not wanted or (begun is None and devices[0].platform != "cpu"):
        return config, None
    if begun is not None:
        sized = with_sizes(config, {MODEL: begun.model, BATCH: begun.batch})
        why = "The configuration leaves out sizes, which are those that the run began with"
    else:
        sized = fitting(config, devices, tokens)
        why = "CPU devices have smaller defaults of sizes that the configuration leaves out"
    keys = "; ".join(map(str, changes(config, sized)))
    usual = [name for name in wanted if begun is None and getattr(sized, name) == getattr(config, name)]
    notes = [f"{why}: {keys}."] if keys else []
    notes += [f"The small `{name}` does not suit this mesh or method: its usual defaults stay." for name in usual]
    return sized, " ".join(notes) or None


def fitting(config: TrainConfig, devices: Sequence[Device], tokens: Callable[[TrainConfig], int]) -> TrainConfig:
    """Return a configuration with as many sections of `SMALL` as suit its meshes and methods, tried without arrays.

    The batch is rounded up to a number of sequences that devices and microbatches share evenly in all stages.
    """
    for names in (SMALL, [BATCH]):
        with suppress(UserError):
            sized = with_sizes(config, {name: SMALL[name] for name in names})
            stages = [(stage.config, make_mesh(stage.config.mesh, devices)) for stage in sized.each_stage]
            if "size" in sizes_left_out(config, BATCH):
                shares = lcm(*(rows_multiple(*each) for each in stages))
                sized = replace(sized, batch=replace(sized.batch, size=-(-sized.batch.size // shares) * shares))
            for stage, (_, mesh) in zip(sized.each_stage, stages, strict=True):
                set_up(stage.config, tokens(sized), mesh)
            return sized
    return config


def with_sizes(config: TrainConfig, sizes: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with the sizes of these sections that it leaves out."""
    found = {}
    for name, source in sizes.items():
        if type(section := getattr(config, name)) is type(source):
            found[name] = replace(section, **{key: getattr(source, key) for key in sizes_left_out(config, name)})
    return replace(config, **found)


def sizes_left_out(config: TrainConfig, name: str) -> Set[str]:
    """Return the keys of a section with small defaults that a configuration leaves out.

    The model has small widths if none is given: one needs the others of the table. Other types have no small sizes.
    """
    section = getattr(config, name)
    absent = {each.name for each in fields(section)} if section is USUAL[name] else section.left_out
    if name == BATCH:
        return absent & {"size", "sequence_length"}
    if type(section) is not LlamaConfig:
        return set()
    return absent & (WIDTHS | {"layers"} if absent >= ALL_WIDTHS else {"layers"})
