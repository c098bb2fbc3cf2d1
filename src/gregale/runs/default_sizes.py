"""Provides the defaults of sizes on CPU devices, on which a step of the other ones takes minutes and 25 GB."""

from dataclasses import fields, replace

from gregale.model.config import LlamaConfig
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.config_diff import changes
from gregale.runs.run_directory import RunDirectory

MODEL = LlamaConfig(layers=4, hidden=256, heads=4, mlp=704)
ON_CPU = {"model": MODEL, "batch": BatchConfig(size=16, sequence_length=256)}


def with_default_sizes(
    config: TrainConfig, platform: str, run: RunDirectory | None = None
) -> tuple[TrainConfig, str | None]:
    """Return a configuration with a platform's sizes of the parts that it leaves out as a whole, and a note of them.

    - `run`: what it resumes; a run that has a checkpoint keeps its sizes on any platform
    """
    saved = None if run is None or run.saved_config() is None else run.read_config()
    defaults = {each.name: each.default for each in fields(TrainConfig)}
    sizes = {
        name: small
        for name, small in ON_CPU.items()
        if getattr(config, name) is defaults[name]
        and (getattr(saved, name) == small if saved is not None else platform == "cpu")
        and (name == "batch" or config.start_from is None)  # which has its own model
    }
    if not sizes:
        return config, None
    sized = replace(config, **sizes)
    keys = "; ".join(map(str, changes(config, sized)))
    return sized, f"The configuration leaves out {' and '.join(sizes)}: CPU devices have smaller defaults: {keys}."
