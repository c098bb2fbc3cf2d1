"""Checkpoints on a disk that all processes share, written and read by Orbax.

A checkpoint is a folder `step-00000100` with three things: `arrays-00000100` (Orbax: sharded, OCDBT), `leaves.json` and
`metadata.json`, and the manifest with every file's checksum. It is written as `step-00000100.partial`; the manifest
comes last, then the folder gets its name. So a folder with that name was complete once, and the manifest tells
whether it still is.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from rich.filesize import decimal

from gregale.files import flush, remove
from gregale.services.checkpoint.leaves import sharding_of
from gregale.services.checkpoint.manifest import FileRecords, files_below, find_damage, record, write_manifest
from gregale.services.checkpoint.processes import collect, hand_over, hashed_by, is_handover
from gregale.services.checkpoint.quiet import silence
from gregale.services.checkpoint.retention import arrays_name, committed_steps, folder_name, unfinished
from gregale.services.checkpoint.shelf import Structs

_REMOVAL_SECONDS = 5.0
_SHARED_BYTES = 16 << 20  # of a replica's share of an array


def arrays_only() -> ocp.type_handlers.TypeHandlerRegistry:
    """How Orbax writes and reads arrays: their replicas share the writing of large ones only.

    Each shape of a share is a program to compile, on each device: for a small model a hundred in its first save.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SHARED_BYTES)
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


class DiskShelf:
    """See `Shelf`."""

    def __init__(self, directory: Path):
        silence()
        self._directory = directory
        self._orbax = ocp.AsyncCheckpointer(
            # Trained floats hardly compress, and the training loop needs the processor's cores.
            ocp.PyTreeCheckpointHandler(
                use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=arrays_only()
            )
        )

    def steps(self) -> list[int]:
        return committed_steps(self._directory)

    def without_manifest(self) -> list[int]:
        """None: on a disk the name of the folder tells whether a checkpoint counts."""
        return []

    def begin(self, step: int, texts: dict[str, str], size: int) -> None:
        if jax.process_index() > 0:
            return
        for path in unfinished(self._directory):
            shutil.rmtree(path)
        partial = self._partial(step)
        partial.mkdir(parents=True)
        disk = shutil.disk_usage(partial)
        if disk.free < size and disk.total:
            words = f"{os.strerror(errno.ENOSPC)}, it needs {decimal(size)} and {decimal(disk.free)} are free"
            raise OSError(errno.ENOSPC, words)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")

    def take(self, step: int, arrays: dict[str, jax.Array]) -> None:
        self._orbax.save(self._partial(step) / arrays_name(step), args=ocp.args.PyTreeSave(arrays))

    def finish(self) -> None:
        self._orbax.wait_until_finished()

    def record(self, step: int) -> FileRecords:
        partial, process, processes = self._partial(step), jax.process_index(), jax.process_count()
        lasting = [name for name in files_below(partial) if not is_handover(name)]
        records = record(partial, [name for name in lasting if hashed_by(name, processes) == process])
        if process > 0:
            hand_over(partial, process, records)
        return records

    def publish(self, step: int, records: FileRecords) -> None:
        partial = self._partial(step)
        records = records | collect(partial, jax.process_count())
        # A network file system may have shown another process its own files too late.
        records |= record(partial, [name for name in files_below(partial) if name not in records])
        write_manifest(partial, records)
        settle(partial)
        committed, replaced = self._folder(step), self._doomed(step)
        if committed.exists():  # outdated, or damaged, or written by a run that this one does not continue
            os.rename(committed, replaced)
        os.rename(partial, committed)
        flush(self._directory)
        remove(replaced)

    def clear(self, step: int) -> None:
        _remove(self._partial(step))

    def delete(self, step: int) -> None:
        """Takes the name away first."""
        os.rename(self._folder(step), self._doomed(step))
        shutil.rmtree(self._doomed(step))

    def read(self, step: int, name: str) -> bytes:
        return (self._folder(step) / name).read_bytes()

    def arrays(self, step: int, structs: Structs) -> dict[str, jax.Array]:
        how = {
            name: ocp.ArrayRestoreArgs(sharding=sharding_of(struct), global_shape=struct.shape, dtype=struct.dtype)
            for name, struct in structs.items()
        }
        args = ocp.args.PyTreeRestore(item=structs, restore_args=how, partial_restore=True)
        return self._orbax.restore(self._folder(step) / arrays_name(step), args=args)

    def damage(self, step: int, part: int, parts: int) -> str | None:
        return find_damage(self._folder(step), part, parts)

    def close(self, has_failed: bool) -> None:
        try:
            if has_failed and jax.process_index() == 0:
                for path in unfinished(self._directory):  # what threads wrote after the save had been given up
                    _remove(path)
        finally:
            self._orbax.close()

    def _folder(self, step: int) -> Path:
        return self._directory / folder_name(step)

    def _partial(self, step: int) -> Path:
        return self._directory / f"{folder_name(step)}.partial"

    def _doomed(self, step: int) -> Path:
        return self._directory / f"{folder_name(step)}.deleted"


def settle(folder: Path) -> None:
    """Waits until all that is below a folder is on the disk: older checkpoints go next, and power may fail."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(place, name))
        flush(Path(place))


def _remove(folder: Path) -> None:
    """Removes a folder into which other threads of a failed save may still write for a moment."""
    until = time.monotonic() + _REMOVAL_SECONDS
    while folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)
