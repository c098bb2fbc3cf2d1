"""Provides the adapters of runs in files: those that a run continues, and the export to a folder of PEFT."""

from pathlib import Path
from typing import Any

import jax
from haliax import NamedArray

from gregale.axes.layout import is_named
from gregale.axes.parameters import trainable
from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.huggingface.config import family_that_has
from gregale.huggingface.families import Family, Slot, parameters_of, path_of, slots_of
from gregale.huggingface.folder import ADAPTER, CONFIG, read_json, write_json
from gregale.huggingface.hub import REPOSITORY
from gregale.huggingface.peft import adapter_settings, adapter_slots, read_adapters
from gregale.model.config import AdapterConfig
from gregale.model.llama import LlamaConfig
from gregale.programs.runtime.checkpointed import recorded
from gregale.programs.runtime.expert_parallelism import set_up
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import Base, as_here, find_run, opened
from gregale.runs.config import TrainConfig
from gregale.runs.config_diff import changes
from gregale.runs.run_directory import RunDirectory

EITHER = ("adapter.start_from", "adapter.base")  # settings in which adapters may differ from those that they continue


def continued(setup: Setup, base: Base) -> Any:
    """Return the adapters of `adapter.start_from` in the structure of the parameters; None: new ones are wanted.

    Raises `UserError` if they are of other targets or of another rank or scale, or were trained beside other weights.
    """
    config = setup.config.adapter
    if config is None or config.start_from is None:
        return None
    folder = Path(config.start_from)
    if (folder / ADAPTER).is_file():
        slots = adapter_slots(slots_of(setup.base, family_of(setup, base.origin)), setup.model)
        found = read_adapters(folder, config, slots, setup.model, setup.layout)
    else:
        found = _of_run(setup, config, config.start_from, base)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: found[path_of(path)], trainable(setup.model), is_leaf=is_named
    )


def _of_run(setup: Setup, config: AdapterConfig, name: str, base: Base) -> dict[str, NamedArray]:
    run = find_run(name)
    theirs = run.read_config()
    if theirs.adapter is None:
        raise UserError(f"adapter.start_from: {run.path} has no adapters; start_from names the model to adapt.")
    found = [each for each in changes(theirs.adapter, config, "adapter") if each.key not in EITHER]
    if fixed := [change for change in found if change.fixed]:
        raise UserError(f"adapter.start_from: {run.path} has other adapters: {'; '.join(map(str, fixed))}.")
    other = set_up(as_here(theirs, setup.config), setup.tokens, setup.layout.mesh)
    with opened(run, other, None) as found:
        if recorded(found.metadata, "base")["digest"] != base.digest:
            raise UserError(
                f"adapter.start_from: the adapters of {run.path} were trained beside other weights than those of "
                f"{base.origin.path}. Set start_from to {theirs.start_from}, or merge them: start_from {run.path}."
            )
        return {path: found.read(path) for path in parameters_of(trainable(setup.model))}


def family_of(setup: Setup, run: RunDirectory) -> Family:
    """Return the family of a run's model: that of the imported model at its beginning, if there is one."""
    saved = read_json(run.huggingface / CONFIG) if (run.huggingface / CONFIG).is_file() else {}
    return family_that_has(decoder_of(setup.config), saved)


def decoder_of(config: TrainConfig) -> LlamaConfig:
    """Return the model's configuration; raise `UserError` if it is none that transformers has."""
    if not isinstance(config.model, LlamaConfig):
        kind = config.model.get_choice_name(type(config.model))
        raise UserError(
            f"model.type is {kind}, a model of your own: other programs have no such model, so nothing could load the "
            "folder. `gregale export` writes models of type llama, gemma and gpt_oss."
        )
    return config.model


def base_name(base: Base, given: str | None) -> str:
    """Return the folder or name from which PEFT reads a base (`given`: the user's); raise `UserError` if it cannot."""
    folder = Path(str(base.origin.huggingface) if given is None else expand(given, "base"))
    is_name = given is not None and not folder.exists() and REPOSITORY.fullmatch(given)
    if not base.origin.is_imported if given is None else not is_name and not (folder / CONFIG).is_file():
        raise UserError(
            f"base: {folder} is no model of transformers, which peft opens. `gregale export {base.origin.path} FOLDER "
            f"--step {base.step}` writes the model of these adapters; then add `--base FOLDER`."
        )
    return str(folder.absolute() if folder.is_dir() else folder)


def write_adapter_settings(folder: Path, setup: Setup, slots: list[Slot], base: str) -> None:
    """Write adapter_config.json; `base`: the model that the adapters are for, see `base_name`."""
    config = setup.config
    assert config.adapter is not None
    write_json(folder / ADAPTER, adapter_settings(config.adapter, slots, base, config.model.experts is not None))
