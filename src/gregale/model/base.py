"""Model configurations by their `type`, and the one that stands for what a model of the hub says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import draccus
from haliax import Axis

from gregale.settings import Fixed, Settings, check_path

SHAPE = Fixed("the saved parameters have this shape")


@dataclass(frozen=True)
class ModelConfig(Settings, draccus.ChoiceRegistry):
    """The choice of a model architecture by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama"

    def split_axes(self) -> dict[str, tuple[str, Axis]]:
        """Configuration key -> (meaning, axis) of every axis that a mesh may split, but for the vocabulary."""
        return {}

    @property
    def head_width(self) -> int:
        """Width of an attention head; 0: there is no attention."""
        return 0

    @property
    def score_cap(self) -> float | None:
        """What bounds the scores of attention; None: nothing does."""
        return None


@ModelConfig.register_subclass("huggingface")
@dataclass(frozen=True)
class HuggingFaceConfig(ModelConfig):
    """The shape in the config.json of a model of the hub, with random weights; a run keeps it as `type: llama`."""

    path: str = field(metadata={"help": "its folder, or its name on the hub: ORG/NAME or ORG/NAME@REVISION"})
    with_tokenizer: bool = field(default=True, metadata={"help": "its tokenizer too, unless data.tokenizer is another"})

    def __post_init__(self):
        super().__post_init__()
        check_path("path", self.path)
