"""Provides the map between a folder's tensors and a model's parameters."""

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import EXPERTS, is_layers, is_named
from gregale.axes.parameters import buffers_of, layer_numbers, layer_order, layers_axis
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.huggingface.families import Family

# Old folders store computed tensors; a tied model may store its head, which is the embedding.
SUPERFLUOUS = (".rotary_emb.inv_freq",)
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Slot:
    """A parameter and its tensor on the hub, or one for each layer and each expert that the name has.

    - `hub`: has `{layer}` and `{expert}` in place of their numbers
    - `layers`: the numbers of the layers with it, in the order of its first axis; None: it belongs to no layer
    - `is_buffer`: whether it is a buffer, which files hold in float32
    - `part`, `parts`: the tensor's last axis has the values of several parameters in turn, and these are the `part`-th
    """

    hub: str  # the tensor's name
    path: str  # the parameter's path in the model
    axes: tuple[Axis, ...]  # the parameter's axes
    groups: tuple[tuple[str, ...], ...]  # names of axes; one dimension of the hub's tensor flattens the axes of a group
    layers: list[int] | None
    is_buffer: bool = False
    part: int = 0
    parts: int = 1

    @property
    def stacked(self) -> int:
        """Return the number of the parameter's first axes that its tensors lack: of layers, and of experts."""
        return (self.layers is not None) + ("{expert}" in self.hub)

    @property
    def own(self) -> tuple[str, ...]:
        """Return the axes of one tensor's part, in the parameter's order."""
        return tuple(axis.name for axis in self.axes[self.stacked :])

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {axis.name: axis.size for axis in self.axes}
        *first, last = (prod(sizes[name] for name in group) for group in self.groups)
        return (*first, last * self.parts)

    def cut_to(self, rows: int) -> "Slot":
        """Return the slot with `rows` rows of a vocabulary, without its padding."""
        return replace(self, axes=tuple(Axis(axis.name, rows) if axis.name == "vocab" else axis for axis in self.axes))

    def name(self, place: tuple[int, ...]) -> str:
        """Return the tensor at an index of the first axes."""
        layer = None if self.layers is None else self.layers[place[0]]
        return self.hub.format(layer=layer, expert=place[-1] if place else None)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return tensor's name -> its index in the parameter's first axes, layer by layer."""
        places = product(*(range(axis.size) for axis in self.axes[: self.stacked]))
        return {self.name(place): place for place in places}

    @property
    def flat(self) -> tuple[str, ...]:
        """Return the axes of the hub's tensor, with the axes of a group separate."""
        return tuple(name for group in self.groups for name in group)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        sizes = {axis.name: axis.size for axis in self.axes}
        return tuple(sizes[name] for name in self.flat)

    def as_flat(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of the parameter's values in the hub's tensor, with the axes `flat`."""
        return tensor.reshape(*self.flat_shape, self.parts)[..., self.part]

    def as_parameter(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of the hub's tensor with the parameter's axes, without the stacked ones."""
        return self.as_flat(tensor).transpose([self.flat.index(name) for name in self.own])


def path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def parameters_of(model: Any) -> dict[str, NamedArray]:
    """Return a model's parameters by their paths; they may be abstract."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named)[0]}


def slots_of(model: Any, family: Family) -> list[Slot]:
    """Return the slots of a model's parameters, in the order of the family's table; they may be abstract.

    Buffers that the family does not name have none.
    """
    slots, found, numbers = [], parameters_of(model), layer_numbers(layer_order(model))
    buffers = parameters_of(buffers_of(model))
    stacks = ["blocks.", *(f"blocks.parts.{structure}." for structure in range(len(numbers)))]
    for hub, (ours, axes) in family.names().items():
        names, stacked = ours.split(), stacks if "{layer}" in hub else stacks[:1]
        for part, path in [(i, name.replace("blocks.", stack, 1)) for stack in stacked for i, name in enumerate(names)]:
            if path in found:
                groups, own = tuple(tuple(group.split()) for group in axes.split(",")), found.pop(path)
                layers, is_buffer = numbers.get(layers_axis(own) or ""), path in buffers
                slot = Slot(hub, path, own.axes, groups, layers, is_buffer, part, len(names))
                assert all(is_layers(axis.name) or axis.name == EXPERTS for axis in own.axes[: slot.stacked])
                slots.append(slot)
    assert found.keys() <= buffers.keys(), f"{family.model_type} has no names for {', '.join(found)}"
    return slots


def check_names(found: set[str], slots: list[Slot], source: str) -> None:
    """Raise `UserError` for missing tensors and for tensors that the model lacks; `source`: the folder's path."""
    count = sum(prod(axis.size for axis in slot.axes[: slot.stacked]) for slot in slots if slot.part == 0)
    if count > 2 * len(found) + 1000:  # before the names are made, which may be billions
        raise UserError(f"{source}: by its config.json the model has {count:,} tensors, and its files {len(found):,}.")
    wanted = {name for slot in slots for name in slot.tensors()}
    ignored = {name for name in found if name.endswith(SUPERFLUOUS)} | {HEAD}
    problems = [
        f"{what} {listed(sorted(names))}"
        for what, names in (("lacks", wanted - found), ("also has", found - wanted - ignored))
        if names
    ]
    if problems:
        text = " and ".join(problems)
        raise UserError(f"{source} does not hold the model that its config.json describes: it {text}.")
