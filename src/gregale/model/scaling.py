"""Rotary frequencies scaled to a longer context: the choices of `model.rotary_scaling`."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import draccus
import numpy as np

from gregale.errors import KeyedError
from gregale.settings import Fixed, Settings, above, setting, whole

MEANING = Fixed("the saved parameters were trained for this one, and would silently be another model")


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
    original_context: int = setting(
        8192,
        "context length before the stretching, in tokens",
        range=whole(1),
        aliases=("original_max_position_embeddings",),
        fixed=MEANING,
    )

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
