"""Provides the sizes that a configuration leaves out on CPU devices, which the other defaults would keep for hours."""

from dataclasses import fields, replace

from gregale.model.config import LlamaConfig
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.config_diff import changes

ON_CPU = {
    "model": LlamaConfig(layers=4, hidden=256, heads=4, mlp=704),
    "batch": BatchConfig(size=16, sequence_length=256),
}


def with_default_sizes(
    config: TrainConfig, platform: str, saved: TrainConfig | None = None
) -> tuple[TrainConfig, str | None]:
    """Return a configuration with the sizes of a platform for parts that are left out as a whole, and a note of these.

    - `saved`: the configuration of the run that it resumes, whose sizes stay on any platform
    """
    defaults = {each.name: each.default for each in fields(TrainConfig)}
    left_out = {name: value for name, value in ON_CPU.items() if getattr(config, name) is defaults[name]}
    if config.start_from is not None:
        left_out.pop("model", None)  # it is the other run's
    if saved is not None:
        left_out = {name: value for name, value in left_out.items() if getattr(saved, name) == value}
    if not left_out or (saved is None and platform != "cpu"):
        return config, None
    sized = replace(config, **left_out)
    names, keys = " and ".join(left_out), "; ".join(map(str, changes(config, sized)))
    return sized, f"The configuration leaves out {names}: on CPU devices the defaults are smaller: {keys}."
