"""Provides the read of a folder's tensors into the shards of a mesh, one shard of a parameter at a time."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding

from gregale.axes.layout import Layout, Tree, is_named
from gregale.axes.parameters import buffers_of
from gregale.errors import UserError
from gregale.huggingface.folder import Folder
from gregale.huggingface.safetensors import Tensor, blocks
from gregale.huggingface.tensor_names import HEAD, TABLE, Slot, parameters_of, path_of, slots_of


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
