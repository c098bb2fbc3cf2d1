"""The outer side of an island on disk: one folder a round, beside the checkpoints of the inner side.

`round-00000012` has `arrays.bin`, the arrays one after the other, and `manifest.json`, which says what they are, and
their hashes. It is written as `round-00000012.partial` and gets its name last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gregale.errors import UserError
from gregale.files import reason
from gregale.islands.protocol.headers import Outer
from gregale.methods.island_outer import Held

ARRAYS, MANIFEST, PARTIAL = "arrays.bin", "manifest.json", ".partial"


class Saved(NamedTuple):
    """An outer side that was read."""

    outer: Outer
    arrays: dict[str, np.ndarray]
    versions: dict[str, int]


def folder_of(directory: Path, number: int) -> Path:
    """Where the outer side after `number` rounds is."""
    return directory / f"round-{number:08d}"


def write(directory: Path, outer: Outer, leaves: Mapping[str, Held]) -> None:
    """Writes the outer side of a round, whole or not at all; nothing if it is there already. Raises OSError."""
    folder = folder_of(directory, outer.round)
    if _is_of(folder, outer):
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a fleet that was lost and has made this round again
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    entries = []
    try:
        with (partial / ARRAYS).open("wb") as file:
            for name, held in leaves.items():
                array = np.ascontiguousarray(held.array)
                file.write(array.view(np.uint8).reshape(-1).data if array.size else b"")
                entries.append([name, array.dtype.str, list(held.array.shape), held.version, _hash(array)])
        text = json.dumps({"outer": outer.to_json(), "arrays": entries})
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(directory: Path, number: int) -> Saved:
    """Reads the outer side of a round; raises `UserError` if it is not there or damaged."""
    folder = folder_of(directory, number)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        outer = Outer.from_json(manifest["outer"])
        arrays, versions = {}, {}
        with (folder / ARRAYS).open("rb") as file:
            for name, dtype, shape, version, digest in manifest["arrays"]:
                array = np.fromfile(file, np.dtype(dtype), int(np.prod(shape, dtype=np.int64))).reshape(shape)
                if _hash(array) != digest:
                    raise ValueError(f"{name} is not what was written")
                arrays[name], versions[name] = array, version
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"The outer parameters in {folder} cannot be read ({why}). Without them this island can go on only with "
            f"those of its peers: give --fresh, and it joins them anew."
        ) from error
    return Saved(outer, arrays, versions)


def keep_only(directory: Path, numbers: Iterable[int]) -> None:
    """Deletes the folders of all other rounds."""
    kept = {folder_of(directory, number).name for number in numbers}
    for folder in directory.glob("round-*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, outer: Outer) -> bool:
    """Whether a folder has the outer side of this record."""
    try:
        return Outer.from_json(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["outer"]) == outer
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _hash(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, digest_size=16).hexdigest()
