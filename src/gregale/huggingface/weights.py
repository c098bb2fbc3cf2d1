"""The weights of a model from and to a folder of transformers."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import Layout, Tree, is_named
from gregale.axes.parameters import buffers_of
from gregale.errors import UserError
from gregale.huggingface.families import HEAD, TABLE, Slot, parameters_of, path_of, slots_of
from gregale.huggingface.folder import INDEX, SUFFIX, WEIGHTS, Folder, write_json
from gregale.huggingface.safetensors import Plan, Tensor, blocks, plan_file


def reader(folder: Folder, model: Tree, layout: Layout) -> Callable[[str], NamedArray]:
    """Return a function that reads one parameter by its path under `params`; each process reads its own shards.

    - `model`: the abstract model, with the requested dtypes; the padding of its vocabulary is zero, and a buffer that
      the files lack is 1: the load of experts

    Raises `UserError` if the folder has another model.
    """
    slots = [slot.cut_to(folder.model.vocabulary or 0) for slot in slots_of(model, folder.family)]
    folder.check(slots)
    by_path, leaves = {slot.path: slot for slot in slots}, parameters_of(model)
    buffers = parameters_of(buffers_of(model))

    def read(path: str) -> NamedArray:
        leaf = leaves[path]
        sharding = layout.sharding(leaf.axes, layout.compute if path in buffers else layout.params)
        return read_slot(by_path.get(path), folder.tensors, leaf, sharding)

    return read


def read_slot(
    slot: Slot | None, tensors: Mapping[str, Tensor], leaf: NamedArray, sharding: NamedSharding
) -> NamedArray:
    """Return a parameter from its tensors; `leaf`: its abstract form; `slot`: None if the files lack it."""
    array: Any = leaf.array
    shard: Any = partial(_shard, slot, tensors, array)
    return NamedArray(jax.make_array_from_callback(array.shape, sharding, shard), leaf.axis_names)


def read_model(folder: Folder, model: Tree, layout: Layout) -> Tree:
    """Read the whole model; arguments and errors as for `reader`."""
    read = reader(folder, model, layout)
    return jax.tree_util.tree_map_with_path(lambda path, _: read(path_of(path)), model, is_leaf=is_named)


def _shard(
    slot: Slot | None, tensors: Mapping[str, Tensor], leaf: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    """Return a shard of a parameter, [*index], from the files; rows that the files lack are zero."""
    shape = [len(range(size)[part]) for size, part in zip(leaf.shape, index, strict=True)]
    if slot is None:
        return np.ones(shape, leaf.dtype)
    if not slot.stacked:
        found = slot.as_parameter(tensors[slot.hub].mapped())[index]
        found = np.ascontiguousarray(found, leaf.dtype)
        missing = [(0, wanted - size) for wanted, size in zip(shape, found.shape, strict=True)]
        return np.pad(found, missing) if found.shape != tuple(shape) else found
    found, lead = np.empty(shape, leaf.dtype), slot.stacked
    starts = [range(size)[part].start for size, part in zip(leaf.shape, index[:lead], strict=False)]
    for place in np.ndindex(*shape[:lead]):
        name = slot.name(tuple(np.add(place, starts)))
        found[place] = slot.as_parameter(tensors[name].mapped())[index[lead:]]
    return found


def check_finite(tensor: Tensor, values: np.ndarray) -> None:
    """Raise `UserError` if one of a tensor's values, or of a part of them, is NaN or infinite; go block by block."""
    if not all(np.isfinite(block).all() for block in blocks(values)):
        raise UserError(f"{tensor.path}: {tensor.name} holds NaN or infinity: damaged, or of a training that failed.")


def check_tied(folder: Folder) -> None:
    """Raise `UserError` if the files of a model with a tied head have a head that differs from the embedding."""
    head, table = folder.tensors.get(HEAD), folder.tensors.get(TABLE)
    if not folder.model.tied_head or head is None or table is None:
        return
    pairs = zip(blocks(head.mapped()), blocks(table.mapped()), strict=False)
    if head.shape != table.shape or not all(np.array_equal(*pair) for pair in pairs):
        raise UserError(
            f"{folder.path}: {HEAD} is another tensor than {TABLE}, though tie_word_embeddings says that they are one. "
            "Set it to false in config.json if both were trained."
        )


Files = Mapping[str, list[str]]
"""File name -> names of its tensors, in order."""

Dtypes = Mapping[str, np.dtype]
"""Tensor's name -> its dtype in the file."""


def plan_files(folder: Path, files: Files, slots: list[Slot], dtypes: Dtypes) -> list[Plan]:
    """Return the plans of a model's files, equal in all processes, without a write."""
    shapes = {name: slot.shape for name, slot in slots_by_name(slots).items()}
    return [plan_file(folder / file, {name: shapes[name] for name in names}, dtypes) for file, names in files.items()]


Transposing = Callable[[jax.Array, tuple[int, ...]], tuple[jax.Array, jax.Array]]


class Writer:
    """Writes parameters to existing files of full size; each of several processes writes the shards of its devices.

    It writes one tensor at a time: a layer of a parameter, or one of its experts. The devices transpose and cast their
    shards, and the process writes each shard to its byte range. Devices send nothing to one another.

    - `layout`: layout of the parameters
    """

    def __init__(self, plans: Iterable[Plan], layout: Layout, report: Callable[[int], None]):
        """Open no file yet; `report` takes the number of bytes written since its last call."""
        self._plans, self._layout, self._report = list(plans), layout, report
        self._tensors = {name: tensor for plan in self._plans for name, tensor in plan.tensors.items()}
        self._programs: dict[tuple, Transposing] = {}  # many parameters have the same shape

    def write(self, slot: Slot, parameter: NamedArray) -> None:
        """Write a parameter without the padding of its vocabulary.

        Raises `UserError` if a value is too large for its dtype.
        """
        transposing: dict[np.dtype, Transposing] = {}
        for name, place in slot.tensors().items():
            tensor = self._tensors[name]
            if tensor.dtype not in transposing:
                transposing[tensor.dtype] = self._transposing(slot, parameter, tensor.dtype)
            found, is_finite = transposing[tensor.dtype](parameter.array, place)
            if tensor.dtype.itemsize < parameter.dtype.itemsize and not is_finite:
                raise UserError(
                    f"dtype: {tensor.name} has values that are too large for {tensor.dtype}; bfloat16 or float32 holds "
                    "them."
                )
            _put(found, tensor, slot)
            self._report((tensor.end - tensor.begin) // slot.parts)

    def finish(self) -> None:
        """Flush this process's writes to the disk."""
        for plan in self._plans:
            with open(plan.path, "rb+") as file:
                os.fsync(file.fileno())

    def _transposing(self, slot: Slot, parameter: NamedArray, dtype: np.dtype) -> Transposing:
        """Return a function of a parameter and an index of its stack: the tensor, and whether it is finite."""
        order, own = tuple(slot.own.index(name) for name in slot.flat), parameter.array.shape[slot.stacked :]

        def transposed(array: jax.Array, place: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
            sizes = (1,) * len(place) + own
            part = jax.lax.dynamic_slice(array, (*place, *(0 for _ in own)), sizes).reshape(own)
            found = part.transpose(order).astype(dtype)
            return found, jnp.isfinite(found).all()

        everywhere = NamedSharding(self._layout.mesh, PartitionSpec())
        shardings = (self._layout.sharding(slot.flat, self._layout.params), everywhere)
        return self._programs.setdefault((order, own, dtype, shardings), jax.jit(transposed, out_shardings=shardings))


def _put(found: jax.Array, tensor: Tensor, slot: Slot) -> None:
    """Write the shards of this process's devices, each replica once."""
    target = slot.as_flat(tensor.mapped(writable=True))
    for shard in found.addressable_shards:
        if shard.replica_id == 0:
            index = [part.indices(size) for part, size in zip(shard.index, found.shape, strict=True)]
            within = [slice(start, min(stop, size)) for (start, stop, _), size in zip(index, target.shape, strict=True)]
            if all(part.start < part.stop for part in within):
                target[tuple(within)] = np.asarray(shard.data)[tuple(slice(part.stop - part.start) for part in within)]


def slots_by_name(slots: list[Slot]) -> dict[str, Slot]:
    """Return tensor's name -> its slot, in the order of the computation: layer by layer."""
    outside = [slot for slot in slots if slot.layers is None]
    layers: dict[int, dict[str, Slot]] = {}
    for slot in slots:
        for name, place in slot.tensors().items():
            if slot.layers is not None:
                layers.setdefault(slot.layers[place[0]], {})[name] = slot
    found = {slot.hub: slot for slot in outside[:1]}
    for layer in sorted(layers):
        found |= layers[layer]
    return found | {slot.hub: slot for slot in outside[1:]}


def bytes_of(slots: list[Slot], dtypes: Dtypes) -> dict[str, int]:
    """Return tensor's name -> its bytes, in the same order."""
    return {name: prod(slot.shape) * dtypes[name].itemsize for name, slot in slots_by_name(slots).items()}


def files_of(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Return the tensors of files of at most `limit` bytes, named as on the hub; a larger tensor has its own file."""
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


def write_index(folder: Path, files: Files, sizes: Mapping[str, int], before: Mapping[str, Any]) -> None:
    """Write the index of several files. `before`: the metadata of the imported index."""
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": {**before, "total_size": sum(sizes.values())}, "weight_map": weight_map})
