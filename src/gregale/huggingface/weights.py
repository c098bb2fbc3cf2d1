"""Tensors from files into the shards of a mesh, and back: a shard, or a tensor, is held at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import LAYERS, Layout, is_named
from gregale.data.progress import Report, silent
from gregale.errors import UserError
from gregale.huggingface.folder import INDEX, SUFFIX, WEIGHTS, Folder, write_json
from gregale.huggingface.names import Slot, slots_of
from gregale.huggingface.safetensors import Tensor, blocks, write_header

Tree = Any
Files = Mapping[str, list[str]]
"""File name -> names of its tensors, in their order."""


def read_model(folder: Folder, model: Tree, layout: Layout, report: Report = silent) -> Tree:
    """A folder's model under `params`; every process reads the ranges of its own shards.

    Arguments:
    - `model`: the abstract one, with the dtypes that are wanted

    Raises `UserError` if the folder holds another model.
    """
    slots = slots_of(model, folder.family)
    folder.check(slots)
    by_path = {slot.path: slot for slot in slots}
    done, total = 0, sum(leaf.size for leaf in jax.tree.leaves(model))

    def one(path, leaf: NamedArray) -> NamedArray:
        nonlocal done
        slot = by_path[jax.tree_util.keystr(path, simple=True, separator=".")]
        read: Any = partial(_shard, slot, folder.tensors, leaf.array.dtype)
        sharding = layout.sharding(leaf.axes, layout.params)
        array = jax.make_array_from_callback(leaf.array.shape, sharding, read)
        report("reading", done := done + leaf.size, total)
        return NamedArray(array, leaf.axis_names)

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=is_named)


def _shard(slot: Slot, tensors: Mapping[str, Tensor], dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a parameter, [*index], read from the files."""
    if slot.layers is None:
        return np.ascontiguousarray(slot.as_parameter(tensors[slot.hub].mapped())[index], dtype)
    assert slot.axes[0].name == LAYERS
    layers = range(slot.layers)[index[0]]
    shape = [len(range(axis.size)[part]) for axis, part in zip(slot.axes[1:], index[1:], strict=True)]
    found = np.empty((len(layers), *shape), dtype)
    for row, layer in zip(found, layers, strict=True):
        row[...] = slot.as_parameter(tensors[slot.name(layer)].mapped())[index[1:]]
    return found


def check_finite(tensor: Tensor) -> None:
    """Raises `UserError` if a value is NaN or infinite; reads the tensor block by block."""
    if not all(np.isfinite(block).all() for block in blocks(tensor.mapped())):
        raise UserError(f"{tensor.path}: {tensor.name} holds NaN or infinity: damaged, or of a training that failed.")


def write_model(
    model: Tree, slots: list[Slot], folder: Path, files: Files, dtype: np.dtype, report: Report = silent
) -> None:
    """Writes a model's tensors, one after the other, and the index if there are several files.

    Arguments:
    - `model`: on its mesh
    - `slots`: whose axes may be shorter than the model's: a vocabulary without its padding

    Raises `UserError` if a value is too large for the dtype.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named)[0]
    }
    places = places_of(slots)
    fetch = _fetcher()
    done, total = 0, sum(bytes_of(slots, dtype).values())
    for file_name, names in files.items():
        with open(folder / file_name, "wb") as file:
            write_header(file, {name: places[name][0].shape for name in names}, dtype)
            for name in names:
                slot, layer = places[name]
                tensor = _cast(slot.as_tensor(_cut(slot, fetch(leaves[slot.path].array, layer))), dtype, name)
                file.write(tensor.view(np.uint8).data)
                report("writing", done := done + tensor.nbytes, total)
            file.flush()
            os.fsync(file.fileno())


def _fetcher() -> Callable[[jax.Array, int | None], np.ndarray]:
    """Fetches an array, or a layer of it, to the host: on its way it is whole on every device, and nothing else is."""
    programs: dict = {}

    def fetch(array: jax.Array, layer: int | None) -> np.ndarray:
        key = array.sharding, layer is None
        if key not in programs:
            assert isinstance(array.sharding, NamedSharding)
            everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
            function = _whole if layer is None else _layer
            programs[key] = jax.jit(function, out_shardings=everywhere)
        found = programs[key](array) if layer is None else programs[key](array, layer)
        return np.asarray(found.addressable_data(0))

    return fetch


def _whole(array: jax.Array) -> jax.Array:
    return array


def _layer(array: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)


def _cut(slot: Slot, part: np.ndarray) -> np.ndarray:
    sizes = {axis.name: axis.size for axis in slot.axes}
    return part[tuple(slice(sizes[name]) for name in slot.own)]


def _cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(tensor, dtype)
    if dtype.itemsize < tensor.itemsize and not all(np.isfinite(block).all() for block in blocks(found)):
        raise UserError(f"dtype: {name} has values that are too large for {dtype}; bfloat16 or float32 holds them.")
    return found


def places_of(slots: list[Slot]) -> dict[str, tuple[Slot, int | None]]:
    """Tensor's name -> its slot and layer, in the order in which a model computes: layer by layer."""
    layers = max(slot.layers or 0 for slot in slots)
    outside = [slot for slot in slots if slot.layers is None]
    places: dict[str, tuple[Slot, int | None]] = {outside[0].hub: (outside[0], None)}
    for layer in range(layers):
        places |= {slot.name(layer): (slot, layer) for slot in slots if slot.layers is not None}
    return places | {slot.hub: (slot, None) for slot in outside[1:]}


def bytes_of(slots: list[Slot], dtype: np.dtype) -> dict[str, int]:
    """Tensor's name -> its bytes, in the same order."""
    return {name: prod(slot.shape) * dtype.itemsize for name, (slot, _) in places_of(slots).items()}


def files_of(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Tensors to files of at most `limit` bytes, named as the hub names them; a larger tensor has a file of its own."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{n:05}-of-{len(parts):05}{SUFFIX}": part for n, part in enumerate(parts, 1)}


def files_as(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """The files of an index."""
    return {
        file: [name for name in weight_map if weight_map[name] == file] for file in sorted(set(weight_map.values()))
    }


def write_index(folder: Path, files: Files, sizes: Mapping[str, int], before: Mapping[str, Any]) -> None:
    """The index of several files. `before`: the metadata of the index that the model came with."""
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": {**before, "total_size": sum(sizes.values())}, "weight_map": weight_map})
