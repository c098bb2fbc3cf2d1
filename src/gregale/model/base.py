"""Model configurations by their `type`, and the one that takes its shape from a model of the hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import draccus
from haliax import Axis

from gregale.settings import Fixed, Settings, check_path, setting

SHAPE = Fixed("the saved parameters have this shape")


@dataclass(frozen=True)
class ModelConfig(Settings, draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`."""

    score_softcap: ClassVar[float | None] = None  # the limit of attention scores; None: no limit

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Return configuration key -> (meaning, axis) of every axis that a mesh may split, except the vocabulary."""
        return {}

    @property
    def head_width(self) -> int:
        """Return the width of an attention head; 0 without attention."""
        return 0


@ModelConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceConfig(ModelConfig):
    """The shape in the config.json of a model of the hub, with random weights; a run keeps it as `type: llama`."""

    path: str = field(metadata={"help": "its folder, or its name on the hub: ORG/NAME or ORG/NAME@REVISION"})
    with_tokenizer: bool = setting(True, "its tokenizer too, unless data.tokenizer is another")

    def __post_init__(self):
        super().__post_init__()
        check_path("path", self.path)
