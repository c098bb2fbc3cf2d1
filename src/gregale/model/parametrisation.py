"""Factors of initial weights and rates by the size of a model, so that a small model's best rates are a large one's."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import draccus
import jax

from gregale.axes.layout import is_named
from gregale.axes.parameters import has_name, names_of_arrays
from gregale.settings import Fixed, Settings, setting, whole

BASE = Fixed("initial weights and the optimizer's moments are scaled by it")
HIDDEN = ("query.weight", "key.weight", "value.weight", "gate.weight", "up.weight", "mlp.gate", "mlp.up")
OUT = ("attention.out.weight", "mlp.down", "down.weight")  # matrices whose products are added to the stream
OUT_BIASES = ("attention.out.bias", "mlp.down_bias")


class Scaling(NamedTuple):
    """The factors of some parameters, relative to those of the base model.

    - `match`: their names, as in `optimizer.groups`; the first of a model's scalings that has a name counts
    - `initial`: of the initial weights
    - `elements`: of the rate, for updates whose elements have a fixed size (Adam, Lion)
    - `rms`: of the rate, for orthogonal updates whose elements have a fixed root mean square
    - `spectral`: of the rate, for orthogonal updates with a norm of sqrt(outputs / inputs)
    - `gradient`: of the gradient's expected size
    """

    match: str
    initial: float
    elements: float
    rms: float
    spectral: float
    gradient: float


class DecoderSettings(Protocol):
    """The settings of a decoder that factors depend on."""

    scaled_embedding: ClassVar[bool]

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def norms(self) -> str: ...
    @property
    def tied_head(self) -> bool: ...


@dataclass(frozen=True)
class Parametrisation(Settings, draccus.ChoiceRegistry):
    """The choice of a parametrisation by `type`."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "complete_p"

    @abstractmethod
    def scalings(self, config: DecoderSettings) -> tuple[Scaling, ...]:
        """Return the factors of all parameters of a model; nothing for the base model."""


@Parametrisation.register_subclass("complete_p")
@dataclass(frozen=True)
class CompletePConfig(Parametrisation):
    """Complete-P (arXiv 2505.01618, alpha 1) without factors in the forward pass.

    The paper multiplies the logits by 1 / m and the output of half a layer by 1 / l, with m = hidden / base_hidden and
    l = layers / base_layers. Here such a factor a is part of the weight behind it: W' = a W. A rate of W becomes a
    times as large, its gradient and epsilon 1 / a times, and the product of rate and weight decay stays.
    """

    base_hidden: int = setting(
        256, "`hidden` of the model whose rates are known", range=whole(1), fixed=BASE, by_topic=True
    )
    base_layers: int | None = setting(
        None, "its `layers`; null: as many as here", range=whole(1), fixed=BASE, by_topic=True
    )

    def scalings(self, config: DecoderSettings) -> tuple[Scaling, ...]:
        width, depth = config.hidden / self.base_hidden, config.layers / (self.base_layers or config.layers)
        if width == depth == 1:
            return ()

        def scaling(match: str, factor: float = 1.0, matrix: bool = False, layer: bool = True, initial: float = 1.0):
            inputs = width if matrix else 1.0
            rms = factor / inputs**0.5
            gradient = 1 / (width * (depth if layer else 1.0) * factor)
            return Scaling(match, initial * rms, factor / inputs, rms, rms * width**0.5, gradient)

        def inside(names: tuple[str, ...]) -> str:
            return "|".join(f"layer.*.{name}" for name in names)

        embedding = width**-0.5 if config.scaled_embedding else 1.0  # the forward pass multiplies by sqrt(hidden)
        last_norm = 1 / (width * embedding) if config.tied_head else 1.0
        normed = config.norms != "before"  # so that a factor of the weight behind a norm has no effect
        norms = ("attention_norm.weight", "mlp_norm.weight") if config.norms == "after" else ("*_out_norm.weight",)
        out = 1.0 if normed else 1 / depth
        return (
            scaling("embedding", embedding, layer=False),
            scaling("norm.weight", last_norm, layer=False),
            scaling("head", 1 / width, layer=False),
            scaling(inside(("mlp.router", "mlp.shared_gate")), 1 / width),  # of few outputs, as a head
            scaling(inside(norms), 1 / depth),
            # Initial weights are divided by the root of the number of layers already.
            scaling(inside(OUT), out, matrix=True, initial=depth**0.5),
            scaling(inside(OUT_BIASES), out),
            scaling(inside(HIDDEN), matrix=True),
            scaling("*"),
        )


def scaled(model: Any, scalings: tuple[Scaling, ...], norm_offset: float) -> Any:
    """Return a new model with its initial weights times their factors.

    - `norm_offset`: added to the weights of norms in the forward pass
    """

    def one(leaf: Any, name: str) -> Any:
        factor = next(each.initial for each in scalings if has_name(each.match, name))
        offset = norm_offset if name.endswith("norm.weight") else 0.0
        return leaf if factor == 1 else (leaf + offset) * factor - offset

    if not scalings:
        return model
    found = [one(leaf, names[0]) for leaf, names in names_of_arrays(model)]
    return jax.tree.structure(model, is_leaf=is_named).unflatten(found)
