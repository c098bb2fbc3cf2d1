"""Writing of a checkpoint's files under unique names, with the manifest last.

A checkpoint is `step-00000100/manifest.json` and a folder with a random name for each save. The folder has
`leaves.json`, `metadata.json`, `pieces.json` and the streams of all processes (see `shard_layout`), cut into parts:
`00003-00000` is the first part of process 3. Without the manifest, which alone is renamed, the checkpoint is not valid.
A lost process that still writes uses another folder.
"""

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
from gregale.checkpoint.manifest import MANIFEST, SHARDS, FileRecords, write_manifest
from gregale.checkpoint.multihost import collect
from gregale.checkpoint.retention import without_manifest
from gregale.checkpoint.shard_layout import planned, stream, to_json
from gregale.storage import StoragePath, StoreError, files_below, remove_tree


def make_room(directory: StoragePath, size: int) -> None:
    """Remove unfinished checkpoints of killed processes; raise OSError if less than `size` bytes are free then."""
    for name in without_manifest(directory):
        remove_tree(directory / name)
    if isinstance(directory, Path):
        directory.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(directory)
        if disk.free < size and disk.total:
            message = f"{os.strerror(errno.ENOSPC)}, it needs {decimal(size)} and {decimal(disk.free)} are free"
            raise OSError(errno.ENOSPC, message)


def prepare(root: StoragePath, arrays: dict[str, jax.Array], texts: Mapping[str, str]) -> Callable[[], FileRecords]:
    """Copy the shards that this process writes; afterwards the arrays may be donated.

    Returns a function that writes the copies (and `texts` in process 0) below `root` and returns the checksums.
    """
    process, part_bytes = jax.process_index(), parts.PART_BYTES
    plan = planned(arrays)
    contents = stream(arrays, plan, process)
    own_texts = {**texts, SHARDS: to_json(plan, part_bytes)} if process == 0 else {}

    def write() -> FileRecords:
        root.mkdir(parents=True, exist_ok=True)
        records = {name: parts.write_part(root / name, [memoryview(text.encode())]) for name, text in own_texts.items()}
        records |= parts.write_parts(root, f"{process:05d}", contents, part_bytes)
        return {f"{root.name}/{name}": record for name, record in records.items()}

    return write


def commit(root: StoragePath, records: FileRecords) -> None:
    """Make a checkpoint valid in place of an earlier one of its step; `records` are those of process 0."""
    folder = root.parent
    records = records | collect(root, jax.process_count())
    for path in (root, folder, folder.parent):
        if isinstance(path, Path):
            flush(path)  # older checkpoints are deleted next, and power may fail
    write_manifest(folder, records)
    with suppress(OSError, StoreError):  # files of the earlier one; at the latest they are deleted with this one
        for name in files_below(folder):
            if name != MANIFEST and not name.startswith(f"{root.name}/"):
                (folder / name).unlink(missing_ok=True)


def discard(root: StoragePath) -> None:
    """Delete the files of a failed save on a disk; in a store, which may have failed, the next save deletes them."""
    if isinstance(root, Path):
        remove(root)
        with suppress(OSError):  # an earlier checkpoint of the step may be there
            root.parent.rmdir()


def delete(folder: StoragePath) -> None:
    """Delete a checkpoint; delete the manifest first, so that the remaining files are not valid."""
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_tree(folder)
