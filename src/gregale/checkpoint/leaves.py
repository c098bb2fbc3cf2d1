"""The arrays of a tree under stable names, and the check before they are restored into another tree."""

from dataclasses import dataclass
from typing import Any

import jax
from haliax import NamedArray
from jax.sharding import Sharding, SingleDeviceSharding

from gregale.errors import UserError
from gregale.formatting import listed


@dataclass(frozen=True)
class LeafSpec:
    """The shape, the dtype's name and the axis names of a leaf."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] | None  # None: an array without axis names

    def __str__(self) -> str:
        if self.axes is None:
            return f"{self.dtype} [{', '.join(map(str, self.shape))}]"
        sizes = zip(self.axes, self.shape, strict=True)
        return f"{self.dtype} [{', '.join(f'{axis}={size}' for axis, size in sizes)}]"

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def to_json(self) -> dict:
        return {"shape": self.shape, "dtype": self.dtype, "axes": self.axes}

    @staticmethod
    def from_json(entry: dict) -> "LeafSpec":
        axes = entry["axes"]
        return LeafSpec(tuple(entry["shape"]), entry["dtype"], None if axes is None else tuple(axes))


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedArray)


def _array_in(leaf: Any) -> Any:
    """Return the array or ShapeDtypeStruct in a leaf, or None if the leaf is static."""
    value = leaf.array if isinstance(leaf, NamedArray) else leaf
    return value if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "value"


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """Return the jax.Arrays (or ShapeDtypeStructs) of a tree by path (`model/blocks/0/weight`); skip static leaves."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_named)[0]
    named = [(_name(path), array) for path, leaf in paths if (array := _array_in(leaf)) is not None]
    found = dict(named)
    assert len(found) == len(named), "two leaves have the same path: a dictionary key contains a slash"
    return found


def specs_by_name(tree: Any) -> dict[str, LeafSpec]:
    """Return shape, dtype and axis names of every array of a tree."""
    specs = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_named)[0]:
        if (array := _array_in(leaf)) is not None:
            axes = tuple(axis.name for axis in leaf.axes) if isinstance(leaf, NamedArray) else None
            specs[_name(path)] = LeafSpec(tuple(array.shape), str(array.dtype), axes)
    return specs


def fill(template: Any, arrays: dict[str, jax.Array]) -> Any:
    """Return the template with its arrays replaced by the arrays of the same names; static leaves stay."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(template, is_leaf=_is_named)

    def filled(path: tuple, leaf: Any) -> Any:
        if _array_in(leaf) is None:
            return leaf
        array = arrays[_name(path)]
        return NamedArray(array, leaf.axes) if isinstance(leaf, NamedArray) else array

    return jax.tree_util.tree_unflatten(treedef, [filled(path, leaf) for path, leaf in paths])


def sharding_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Return the sharding of a template's leaf; the first local device if it has none."""
    return leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])


def check_match(saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec], path: str, partial: bool) -> None:
    """Check that the leaves of a checkpoint can fill those of a template.

    - `partial`: whether the checkpoint may contain leaves that the template lacks

    Raises `UserError` if leaves are missing, superfluous, or of another shape, axis order or dtype.
    """
    problems = []
    if missing := sorted(wanted.keys() - saved.keys()):
        problems.append(f"it lacks {listed([f'{name} ({wanted[name]})' for name in missing], separator='; ')}")
    if not partial and (extra := sorted(saved.keys() - wanted.keys())):
        problems.append(f"it also has {listed([f'{name} ({saved[name]})' for name in extra], separator='; ')}")
    both = sorted(saved.keys() & wanted.keys())
    differing = [f"{name}: {saved[name]} there, {wanted[name]} here" for name in both if saved[name] != wanted[name]]
    if differing:
        problems.append(f"these differ: {listed(differing, separator='; ')}")
    if problems:
        raise UserError(
            f"The checkpoint {path} was written by another configuration: {'. Also, '.join(problems)}. "
            "Use the configuration it was written with, or begin a new run."
        )
