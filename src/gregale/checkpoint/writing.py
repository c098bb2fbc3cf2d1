"""Writing the files of a checkpoint: under names that nothing else has, with the manifest last.

A checkpoint is `step-00000100/manifest.json` and, in a folder beside it that each save names by chance, `leaves.json`,
`metadata.json`, `pieces.json` and the streams of all processes (see `pieces`), cut into parts: `00003-00000` is the
first of process 3. Nothing but the manifest is renamed: without it none of this counts. What a lost process still
writes falls into another folder.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jax
from rich.filesize import decimal

from gregale.atomic_files import flush, remove
from gregale.checkpoint import parts
from gregale.checkpoint.manifest import MANIFEST, PIECES, FileRecords, write_manifest
from gregale.checkpoint.multihost import collect
from gregale.checkpoint.retention import without_manifest
from gregale.checkpoint.shard_layout import planned, stream, to_json
from gregale.storage import ObjectPath, StoragePath, StoreError, files_below, remove_tree


def make_room(directory: StoragePath, size: int) -> None:
    """Removes what killed processes left unfinished; raises OSError if a disk has less than `size` bytes free then."""
    for name in without_manifest(directory):
        remove_all(directory / name)
    if isinstance(directory, Path):
        directory.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(directory)
        if disk.free < size and disk.total:
            words = f"{os.strerror(errno.ENOSPC)}, it needs {decimal(size)} and {decimal(disk.free)} are free"
            raise OSError(errno.ENOSPC, words)


def prepare(root: StoragePath, arrays: dict[str, jax.Array], texts: Mapping[str, str]) -> Callable[[], FileRecords]:
    """Copies this process's share of the arrays, which may be donated then.

    Returns a function that writes it below `root`, and `texts` in process 0; it returns the checksums.
    """
    process, part_bytes = jax.process_index(), parts.PART_BYTES
    plan = planned(arrays)
    pieces = stream(arrays, plan, process)
    own_texts = {**texts, PIECES: to_json(plan, part_bytes)} if process == 0 else {}

    def write() -> FileRecords:
        root.mkdir(parents=True, exist_ok=True)
        records = {name: parts.write_part(root / name, [memoryview(text.encode())]) for name, text in own_texts.items()}
        records |= parts.write_parts(root, f"{process:05d}", pieces, part_bytes)
        return {f"{root.name}/{name}": record for name, record in records.items()}

    return write


def commit(root: StoragePath, records: FileRecords) -> None:
    """Has a checkpoint count, in the place of an earlier one of its step; takes the records of process 0."""
    folder = root.parent
    records = records | collect(root, jax.process_count())
    for place in (root, folder, folder.parent):
        if isinstance(place, Path):
            flush(place)  # older checkpoints go next, and power may fail
    write_manifest(folder, records)
    with suppress(OSError, StoreError):  # of the earlier one; it goes with this one at last
        for name in files_below(folder):
            if name != MANIFEST and not name.startswith(f"{root.name}/"):
                (folder / name).unlink(missing_ok=True)


def discard(root: StoragePath) -> None:
    """Frees the room that a failed save takes on a disk; a store may be what failed, and the next save does it."""
    if isinstance(root, Path):
        remove(root)
        with suppress(OSError):  # an earlier checkpoint of the step may be there
            root.parent.rmdir()


def delete(folder: StoragePath) -> None:
    """Deletes a checkpoint; the manifest goes first, so that what is left does not count."""
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_all(folder)


def remove_all(place: StoragePath) -> None:
    """Removes what is below a folder of a store, or what has a name on a disk, whatever it is."""
    if isinstance(place, ObjectPath) or place.is_dir():
        remove_tree(place)
    else:
        place.unlink(missing_ok=True)
