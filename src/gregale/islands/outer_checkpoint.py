"""Checkpoints of the outer state of an island: one folder for each round, beside the checkpoints of the inner state.

They lie on a disk or in an object store. `round-00000012` has the concatenated arrays, cut into files of 48 MiB
(`1f2e3d4c-00000`, ...), and `manifest.json` with their shapes and hashes. The file names are random. The manifest is
written last, atomically, and names the files: so a folder without a manifest is not a checkpoint. It has the number of
its format, and the format before is read too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from gregale.atomic_files import os_error_text
from gregale.checkpoint import files
from gregale.checkpoint.manifest import MANIFEST
from gregale.checkpoint.store import delete
from gregale.errors import UserError
from gregale.islands.protocol.headers import OuterRecord
from gregale.methods.island_outer import NO_OWN_LEAVES, OwnLeaves, VersionedArray
from gregale.storage import StoragePath, StoreError, digest, names, parallel_map, write_bytes

_THREADS = 4  # arrays read in parallel
_FORMAT = 1  # of a manifest, with an `OuterRecord`; 0 is the same without a number


class SavedOuterState(NamedTuple):
    outer: OuterRecord
    arrays: dict[str, np.ndarray]
    versions: dict[str, int]
    own: OwnLeaves


def folder_of(directory: StoragePath, number: int) -> StoragePath:
    """Return the folder of the outer state after `number` rounds."""
    return directory / f"round-{number:08d}"


def write(
    directory: StoragePath, outer: OuterRecord, leaves: Mapping[str, VersionedArray], own: OwnLeaves = NO_OWN_LEAVES
) -> None:
    """Write the outer state of a round atomically; do nothing if it exists.

    Raises OSError or `StoreError`. The outer state of another generation for the same round stays until this one is
    complete.
    """
    folder = folder_of(directory, outer.round)
    if _is_of(folder, outer):
        return
    name_of_parts, part_bytes = uuid4().hex[:8], files.PART_BYTES
    whole = {**leaves, **{name: VersionedArray(array, 0) for name, array in own.arrays.items()}}
    entries: list[list[Any]] = []

    def contents() -> Iterator[np.ndarray]:
        for name, held in whole.items():
            array = np.asarray(held.array)
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            entries.append([name, array.dtype.name, list(array.shape), held.version, digest(content.data)])
            yield content

    folder.mkdir(parents=True, exist_ok=True)
    try:
        files.write_parts(folder, name_of_parts, contents(), part_bytes)
        groups = {str(index): group for index, group in own.groups.items()}
        manifest = {"outer": outer.to_json(), "parts": name_of_parts, "part_bytes": part_bytes, "arrays": entries}
        manifest |= {"own": sorted(own.arrays), "groups": groups, "format": _FORMAT}
        write_bytes(folder / MANIFEST, json.dumps(manifest).encode())
    except (OSError, StoreError):
        _remove(folder, lambda name: name.startswith(name_of_parts))
        raise
    _remove(folder, lambda name: name != MANIFEST and not name.startswith(name_of_parts))


def read(directory: StoragePath, number: int) -> SavedOuterState:
    """Read the outer state of a round.

    Raises `UserError` if it is missing, damaged or of an unknown format, and `StoreError`.
    """
    folder = folder_of(directory, number)
    try:
        manifest = _manifest(folder)
        outer = OuterRecord.from_json(manifest["outer"])
        name_of_parts, part_bytes = manifest["parts"], manifest["part_bytes"]
        kinds = [(np.dtype(dtype), tuple(shape)) for _, dtype, shape, *_ in manifest["arrays"]]
        starts = accumulate((dtype.itemsize * prod(shape) for dtype, shape in kinds), initial=0)
        read_array = partial(_array, folder, name_of_parts, part_bytes)
        found = parallel_map(read_array, manifest["arrays"], kinds, starts, threads=_THREADS)
        arrays = {entry[0]: array for entry, array in zip(manifest["arrays"], found, strict=True)}
        own = OwnLeaves(
            {name: arrays.pop(name) for name in manifest["own"]},
            {int(index): group for index, group in manifest["groups"].items()},
        )
        return SavedOuterState(
            outer, arrays, {entry[0]: entry[3] for entry in manifest["arrays"] if entry[0] in arrays}, own
        )
    except UserError:  # of the format, or of a store that may be reachable again later: a fresh start would not help
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = os_error_text(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"The outer parameters in {folder} cannot be read ({why}). Without them this island can go on only with "
            f"those of its peers: give --fresh, and it joins them anew."
        ) from error


def keep_only(directory: StoragePath, numbers: Iterable[int]) -> None:
    """Delete the folders of all other rounds; ignore errors."""
    kept = {folder_of(directory, number).name for number in numbers}
    for name in names(directory):
        if name.startswith("round-") and name not in kept:
            with suppress(OSError, StoreError):
                delete(directory / name)


def _array(folder: StoragePath, own: str, part_bytes: int, entry: list[Any], kind: tuple, start: int) -> np.ndarray:
    """Read an array that begins at byte `start` of the parts. Raises ValueError if its hash is wrong."""
    dtype, shape = kind
    content = np.empty(dtype.itemsize * prod(shape), np.uint8)
    files.read_parts(content, folder, own, part_bytes, start)
    if digest(content.data) != entry[4]:
        raise ValueError(f"{entry[0]} is not what was written")
    return content.view(dtype).reshape(shape)


def _manifest(folder: StoragePath) -> dict[str, Any]:
    """Return a folder's manifest in this version's format. Raises as `read`, or what JSON and the store raise."""
    manifest = dict(json.loads((folder / MANIFEST).read_bytes()))
    if (found := manifest.get("format", 0)) not in (_FORMAT - 1, _FORMAT):
        raise UserError(
            f"The outer parameters in {folder} have format {found}; this version of Gregale reads {_FORMAT - 1} and "
            f"{_FORMAT}. Start this island with the version that saved them, or with --fresh: it joins its peers anew."
        )
    return manifest


def _is_of(folder: StoragePath, outer: OuterRecord) -> bool:
    """Return whether a folder has the outer state of this record."""
    try:
        return OuterRecord.from_json(json.loads((folder / MANIFEST).read_bytes())["outer"]) == outer
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(folder: StoragePath, chosen: Callable[[str], bool]) -> None:
    """Delete the chosen files of a folder; ignore errors."""
    with suppress(OSError, StoreError):
        for name in filter(chosen, names(folder)):
            (folder / name).unlink(missing_ok=True)
