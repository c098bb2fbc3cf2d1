"""Provides the part of `config.json` about experts: its keys, and what of a model's experts a family supports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gregale.formatting import listed
from gregale.huggingface.typed_json import TypedJson
from gregale.model.config import LlamaConfig
from gregale.model.experts_config import BalanceConfig, ExpertsConfig
from gregale.settings import whole
from gregale.settings.config_schema import types_of

MLP_ONLY, FIRST_DENSE = "mlp_only_layers", "first_k_dense_replace"
SPARSE_STEP = "decoder_sparse_step"
SIZES = ("count", "active", "width", "shared")
LOSS, BIAS = "balance.loss", "balance.bias"
# The fields that only some families support; all families support the others.
COMPARED = ("renormalise", "score", "scale", "groups", "active_groups", "shared", "shared_gate", BIAS)


@dataclass(frozen=True)
class FamilyExperts:
    """The experts of a family's models.

    - `keys`: key of config.json -> field of `model.experts`
    - `same`: fields with the same value in all its models
    - `dense`: the key of the layers with an MLP; None: no layer has one
    - `shared_in_widths`: whether the key of `shared` counts widths of an expert
    """

    keys: Mapping[str, str]
    same: Mapping[str, Any] = field(default_factory=dict)
    dense: str | None = None
    shared_in_widths: bool = False

    @property
    def sizes(self) -> list[str]:
        """Return the keys that config.json needs."""
        return [key for key, ours in self.keys.items() if ours in SIZES]

    def read(self, given: TypedJson) -> dict[str, Any]:
        """Return the fields `experts` and `dense_layers` of a configuration; `given`: the keys of config.json."""
        kinds = types_of(ExpertsConfig) | {LOSS: float}
        fields = {**self.same, **{ours: given.read(key, kinds[ours]) for key, ours in self.keys.items()}}
        balance = BalanceConfig(loss=fields.pop(LOSS, 0.0), bias=fields.pop(BIAS, False))
        if self.shared_in_widths:
            fields["shared"] *= fields["width"]
        return {"experts": ExpertsConfig(**fields, balance=balance), "dense_layers": self._dense_layers(given)}

    def _dense_layers(self, given: TypedJson) -> int:
        if self.dense != MLP_ONLY:
            return 0 if self.dense is None else given.read(self.dense, int | None, None, whole(0)) or 0
        step, only = given.read(SPARSE_STEP, int, 1, whole(1)), given.read(MLP_ONLY, list[int] | None, None) or []
        layers, named = given.read("num_hidden_layers", int), set(only)
        dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
        if dense != [*range(len(dense))]:
            raise given.error(
                f"by {SPARSE_STEP} {step} and {MLP_ONLY} {only}, the layers without experts are "
                f"{listed(list(map(str, dense)))}; Gregale computes models in which they are the first ones."
            )
        return len(dense)

    def written(self, config: LlamaConfig) -> dict[str, Any]:
        """Return the keys of a model's experts in config.json."""
        values = _values(config)
        if self.shared_in_widths:
            values["shared"] //= values["width"]
        found = {key: values[ours] for key, ours in self.keys.items()}
        if self.dense == MLP_ONLY:
            return {**found, SPARSE_STEP: 1, MLP_ONLY: [*range(config.dense_layers)]}
        return found if self.dense is None else {**found, self.dense: config.dense_layers}

    def lacks(self, config: LlamaConfig) -> list[str]:
        """Return the settings of a model with experts that this family does not support."""
        values, free = _values(config), self.keys.values()
        wanted = _values(LlamaConfig(experts=ExpertsConfig())) | dict(self.same)
        found = [
            f"experts.{name} {values[name]}" for name in COMPARED if name not in free and values[name] != wanted[name]
        ]
        if self.shared_in_widths and (not values["shared"] or values["shared"] % values["width"]):
            found.append(f"experts.shared {values['shared']} with width {values['width']}")
        return found + ([f"dense_layers {config.dense_layers}"] if config.dense_layers and self.dense is None else [])


def _values(config: LlamaConfig) -> dict[str, Any]:
    assert config.experts is not None
    return {**vars(config.experts), LOSS: config.experts.balance.loss, BIAS: config.experts.balance.bias}
