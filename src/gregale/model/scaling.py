"""Rotary frequencies scaled to a longer context: the choices of `model.rotary_scaling`."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import draccus
import numpy as np

from gregale.errors import KeyedError
from gregale.settings import Fixed, Settings, above, setting, whole

MEANING = Fixed("the saved parameters were trained for this one, and would silently be another model")


def original_context_setting() -> Any:
    """Return the field of the context with which a model was trained, which each class needs for itself."""
    return setting(
        8192,
        "context length before the stretching, in tokens",
        range=whole(1),
        aliases=("original_max_position_embeddings",),
        fixed=MEANING,
    )


@dataclass(frozen=True)
class RotaryScaling(Settings, draccus.ChoiceRegistry):
    """A scaling of the rotary frequencies to a longer context than that of the model's first training."""

    factor: float = setting(8.0, "how much longer the context becomes", range=above(0), fixed=MEANING)

    @classmethod
    def default_choice_name(cls) -> str:
        return "llama3"

    @abstractmethod
    def kept(self, frequency: np.ndarray) -> np.ndarray:
        """Return the fraction, 0 to 1, of each frequency (radians per position) that stays; `factor` divides others."""

    @property
    def score_factor(self) -> float:
        """Return the number that multiplies attention's scores."""
        return 1.0


@RotaryScaling.register_subclass("linear")
@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        return np.zeros_like(frequency)


@RotaryScaling.register_subclass("llama3")
@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's scaling: low frequencies are scaled, high ones kept, and those between interpolated."""

    low_frequency_factor: float = setting(
        1.0,
        "wavelengths above context / this are stretched",
        range=above(0),
        aliases=("low_freq_factor",),
        fixed=MEANING,
    )
    high_frequency_factor: float = setting(
        4.0, "wavelengths below context / this are kept", range=above(0), aliases=("high_freq_factor",), fixed=MEANING
    )
    original_context: int = original_context_setting()

    def __post_init__(self):
        super().__post_init__()
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise KeyedError(
                "low_frequency_factor",
                f"is {self.low_frequency_factor:g}",
                f" and high_frequency_factor is {self.high_frequency_factor:g}: the wavelengths between context / high "
                "and context / low are interpolated, so that low has to be below high.",
            )

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        turns = self.original_context * frequency / (2 * math.pi)  # in the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return np.clip((turns - low) / (high - low), 0.0, 1.0)


@RotaryScaling.register_subclass("yarn")
@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (arXiv 2309.00071): low frequencies are scaled, high ones kept, and scores are larger.

    Two channels turn `fast_turns` and `slow_turns` times in the original context. The kept fraction of those in between
    falls linearly with the channel's number; that of Llama 3.1's scaling follows the frequency.
    """

    fast_turns: float = setting(
        32.0, "channels that turn more often are kept", range=above(0), aliases=("beta_fast",), fixed=MEANING
    )
    slow_turns: float = setting(
        1.0, "channels that turn less often are stretched", range=above(0), aliases=("beta_slow",), fixed=MEANING
    )
    original_context: int = original_context_setting()
    attention_factor: float | None = setting(
        None, "of queries and of keys; null: 0.1 ln(factor) + 1", range=above(0), fixed=MEANING
    )
    whole_channels: bool = setting(True, "round both limits to whole channels", aliases=("truncate",), fixed=MEANING)

    def __post_init__(self):
        super().__post_init__()
        if self.fast_turns <= self.slow_turns:
            raise KeyedError(
                "fast_turns",
                f"is {self.fast_turns:g}",
                f" and slow_turns is {self.slow_turns:g}: channels in between are interpolated, so that fast has to be "
                "above slow.",
            )

    def kept(self, frequency: np.ndarray) -> np.ndarray:
        # Channel i has the frequency exp(-i * ratio), so that it turns original_context * frequency / (2 pi) times.
        ratio = max(-math.log(frequency[1]), 1e-9) if len(frequency) > 1 else 1.0
        turns = self.fast_turns, self.slow_turns
        low, high = (math.log(self.original_context / (2 * math.pi * each)) / ratio for each in turns)
        low, high = (math.floor(low), math.ceil(high)) if self.whole_channels else (low, high)
        low, high = max(low, 0), min(high, 2 * len(frequency) - 1)
        return 1 - np.clip((np.arange(len(frequency)) - low) / max(high - low, 0.001), 0.0, 1.0)

    @property
    def score_factor(self) -> float:
        given = self.attention_factor
        return (1 + 0.1 * math.log(max(self.factor, 1.0)) if given is None else given) ** 2
