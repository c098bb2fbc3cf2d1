"""Provides the part of `config.json` about experts: its keys, and what of a model's experts a family supports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gregale.formatting import listed
from gregale.huggingface.typed_json import TypedJson
from gregale.model.config import BalanceConfig, ExpertsConfig
from gregale.model.llama import LlamaConfig
from gregale.settings import whole
from gregale.settings.decoding import types_of

MLP_ONLY, FIRST_DENSE = "mlp_only_layers", "first_k_dense_replace"
SPARSE_STEP, MLP_TYPES = "decoder_sparse_step", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
SIZES = ("count", "active", "width", "shared")
LOSS, BIAS = "balance.loss", "balance.bias"


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
        layers = given.read("num_hidden_layers", int)
        if self.dense == MLP_TYPES:
            kinds = given.read(MLP_TYPES, list[str], None) or [DENSE, *[SPARSE] * (layers - 1)]
            if len(kinds) != layers or not set(kinds) <= {DENSE, SPARSE}:
                raise given.error(f"{MLP_TYPES} needs {DENSE} or {SPARSE} for each of the {layers} layers.")
            rule, dense = MLP_TYPES, [layer for layer, kind in enumerate(kinds) if kind == DENSE]
        elif self.dense == MLP_ONLY:
            step, only = given.read(SPARSE_STEP, int, 1, whole(1)), given.read(MLP_ONLY, list[int], [])
            rule, named = f"{SPARSE_STEP} {step} and {MLP_ONLY} {only}", set(only)
            dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
        else:
            return 0 if self.dense is None else given.read(self.dense, int, 0, whole(0))
        if dense != [*range(len(dense))]:
            raise given.error(
                f"by {rule}, the layers without experts are {listed(list(map(str, dense)))}; Gregale computes models "
                "in which they are the first ones."
            )
        return len(dense)

    def written(self, config: LlamaConfig) -> dict[str, Any]:
        """Return the keys of a model's experts in config.json; a size of `shared` that it cannot have is rounded up."""
        experts = config.experts
        assert experts is not None
        values = {**vars(experts), LOSS: experts.balance.loss, BIAS: experts.balance.bias}
        values["shared"] = max(1, -(-experts.shared // (experts.width if self.shared_in_widths else 1)))
        found = {key: values[ours] for key, ours in self.keys.items()}
        dense = config.dense_layers
        if self.dense == MLP_ONLY:
            return {**found, SPARSE_STEP: 1, MLP_ONLY: [*range(dense)]}
        if self.dense == MLP_TYPES:
            return {**found, MLP_TYPES: [DENSE] * dense + [SPARSE] * (config.layers - dense)}
        return found if self.dense is None else {**found, self.dense: dense}
