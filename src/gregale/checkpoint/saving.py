"""Asynchronous, atomic saving of checkpoints, which rejects a state that is not finite.

A checkpoint is `step-00000100/manifest.json` and a folder with a random name for each save. The folder has
`leaves.json`, `metadata.json`, `shards.json` and the streams of all processes (see `shard_layout`), cut into parts:
`00003-00000` is the first part of process 3. Without the manifest, which is written last and alone is renamed, the
checkpoint is not valid. A lost process that still writes uses another folder.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import jax
from rich.filesize import decimal

from gregale.atomic_files import flush, os_error_text, remove
from gregale.checkpoint import parts
from gregale.checkpoint.finite import not_finite
from gregale.checkpoint.leaves import arrays_by_name, specs_by_name
from gregale.checkpoint.manifest import LEAVES, MANIFEST, METADATA, SHARDS, FileRecords, write_manifest
from gregale.checkpoint.multihost import barrier, collect, first_message, hand_over, messages_of_all
from gregale.checkpoint.retention import CheckpointConfig, committed_steps, folder_name, superfluous, without_manifest
from gregale.checkpoint.shard_layout import planned, stream, to_json
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.storage import StoragePath, StoreError, files_below, remove_tree, storage_path


class Saver:
    """Saves the checkpoints of a run, one at a time.

    Every process makes the same calls in the same order.

    - `failure`: the cause if the last save failed, the same in every process; None if it succeeded or is in flight.
    """

    def __init__(
        self,
        directory: StoragePath | str,
        config: CheckpointConfig | None = None,
        report: Callable[[str], None] = print,
        committed: Callable[[int], None] = lambda step: None,
        check: Callable[[], None] = lambda: None,
        in_use: Collection[int] = (),
    ):
        """
        - `directory`: created by the first save.
        - `config`: the retention rules.
        - `report`: called in process 0 with one line for each committed, failed or damaged checkpoint, also from a
          thread.
        - `committed`: called in the same way with the step of each committed checkpoint.
        - `check`: called in the same way before each save and before its commit; raises if this process must not write
          to the run any more.
        - `in_use`: steps whose checkpoints something else reads: they are deleted by a later save.
        """
        self._directory = (storage_path(directory) if isinstance(directory, str) else directory).absolute()
        self._config = config or CheckpointConfig()
        self._report = report if jax.process_index() == 0 else lambda _: None
        self._committed, self._check_owner, self._in_use = committed, check, in_use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[int, Future] | None = None
        self._saves = 0
        self._history: set[int] = set()  # the saved steps, and the step that the run resumed from
        self.failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, tree: Any, metadata: dict, beside: Callable[[], object] = lambda: None) -> None:
        """Save in the background; return once the arrays may be donated. Waits for an earlier save.

        A step that this object has already saved or resumed from is not written again. A failed save (for example on a
        full disk) is reported and its files are deleted. The run continues, with `failure` set until a save succeeds.
        Raises `UserError` if an array of the tree contains NaN or an infinity; nothing is saved.

        - `step`: names the checkpoint.
        - `tree`: pytree of global jax.Arrays.
        - `metadata`: stored as JSON beside the arrays.
        - `beside`: writes further data of the checkpoint to another path, in every process and in the background; if
          it raises, the save fails.
        """
        self.wait()
        if step in self._history:
            return
        self._check_finite(step, tree)
        self._saves += 1
        leaves = {name: spec.to_json() for name, spec in specs_by_name(tree).items()}
        texts = {LEAVES: json.dumps(leaves, indent=1), METADATA: json.dumps(metadata, indent=1)}
        stored = {name: array for name, array in arrays_by_name(tree).items() if array.size > 0}
        size = sum(array.nbytes for array in stored.values())
        # Every process writes to this folder, whose name is unique to this save.
        root = self._directory / folder_name(step) / messages_of_all(uuid4().hex[:8])[0]

        def begin() -> None:
            self._check_owner()  # a process that lost the lease must not delete the new owner's files
            make_room(self._directory, size)

        failed = _failure_of(begin) if jax.process_index() == 0 else None
        if failed:
            self._give_up(step, root, failed)
        self.failure = first_message(str(failed).rstrip(".") if failed else None)
        if self.failure:
            return
        writing: list[Callable[[], FileRecords]] = []
        failed = _failure_of(lambda: writing.append(prepare(root, stored, texts)))
        self._in_flight = step, self._thread.submit(self._commit, step, root, writing, failed, beside)

    def outdate(self, step: int) -> None:
        """Mark the checkpoint of a step as outdated: the next save of that step replaces it."""
        self.wait()
        self._history.discard(step)

    def wait(self) -> None:
        """Wait until the save in flight, if any, is committed or has failed."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        self.failure = first_message(future.result())
        if not self.failure:
            self._history.add(step)

    def close(self) -> None:
        """Wait without the other processes, and end the threads; no save or restore is possible afterwards."""
        self._thread.shutdown()

    def _check_finite(self, step: int, tree: Any) -> None:
        if names := not_finite(tree):
            raise UserError(
                f"After step {step}, {len(names)} arrays of the state hold NaN or infinity ({listed(names)}), so no "
                f"checkpoint is made of it. {self._newest()}. A lower optimizer.learning_rate, a longer warm-up or a "
                f"smaller optimizer.clip_norm may help."
            )

    def _commit(
        self,
        step: int,
        root: StoragePath,
        writing: list[Callable[[], FileRecords]],
        failed: StoreError | None,
        beside: Callable[[], object],
    ) -> str | None:
        """Write the files, commit the checkpoint and delete old ones, in the background thread.

        Takes the failure so far, and returns the message of the first failure that this process knows.
        """
        records: FileRecords = {}

        def write() -> None:
            records.update(writing.pop()())  # `pop` drops the last reference to the copies of the arrays
            beside()
            if jax.process_index() > 0:
                hand_over(root, jax.process_index(), records)

        failed = failed or _failure_of(write)
        barrier(f"{root} has its checksums, save {self._saves}")
        if jax.process_index() == 0:
            failed = failed or _failure_of(self._check_owner)
            failed = failed or _failure_of(lambda: commit(root, records))
            if failed:
                self._give_up(step, root, failed)
            else:
                self._report(f"The checkpoint of step {step} is saved.")
                self._tidy(step)
        barrier(f"{root} is committed, save {self._saves}")
        return str(failed).rstrip(".") if failed else None

    def _tidy(self, saved: int) -> None:
        """Call `committed` and delete old checkpoints; a failure is only reported."""

        def tidy() -> None:
            self._committed(saved)
            for old in superfluous(committed_steps(self._directory), saved, self._config):
                if old not in self._in_use:
                    delete(self._directory / folder_name(old))

        if failed := _failure_of(tidy):
            self._report(f"Old checkpoints in {self._directory} were not deleted: {failed.fact.rstrip('.')}.")

    def _give_up(self, step: int, root: StoragePath, failed: StoreError) -> None:
        """Delete the files of a failed save and report the failure."""
        discard(root)
        self._report(f"The checkpoint of step {step} could not be saved: {failed.fact.rstrip('.')}. {self._newest()}.")

    def _newest(self) -> str:
        try:
            steps = committed_steps(self._directory)
        except UserError:  # the store does not respond, which is likely the cause of the failure
            return "The earlier ones are unchanged"
        return f"The newest one is that of step {steps[-1]}" if steps else "There is no earlier one"


def _failure_of(action: Callable[[], object]) -> StoreError | None:
    """Return the failure of an action, of a store or not; None if it succeeds."""
    try:
        action()
    except StoreError as error:
        return error
    except Exception as error:
        return StoreError(str(error) if isinstance(error, UserError) else os_error_text(error))
    return None


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
