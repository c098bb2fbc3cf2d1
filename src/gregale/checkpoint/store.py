"""The checkpoints of a run: they are saved in the background, restored, and deleted by age.

A checkpoint is `step-00000100/manifest.json` and a folder with a random name for each save. The folder has
`leaves.json`, `metadata.json`, `shards.json` and the streams of all processes (see `checkpoint.files`), cut into parts:
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
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from uuid import uuid4

import jax
import numpy as np
from rich.filesize import decimal

from gregale.atomic_files import flush, os_error_text, remove
from gregale.checkpoint import files
from gregale.checkpoint.files import (
    LeafSpec,
    Region,
    RowRange,
    arrays_by_name,
    check_match,
    fill,
    from_json,
    not_finite,
    planned,
    read_parts,
    region_of,
    rows_for,
    sharding_of,
    specs_by_name,
    stream,
    to_json,
    wanted,
)
from gregale.checkpoint.manifest import (
    LEAVES,
    MANIFEST,
    METADATA,
    SHARDS,
    CheckpointConfig,
    FileRecords,
    committed_steps,
    find_damage,
    folder_name,
    read_metadata,
    root_of,
    step_of,
    superfluous,
    without_manifest,
    write_manifest,
)
from gregale.checkpoint.multihost import (
    agreed,
    barrier,
    by_first_process,
    collect,
    first_message,
    hand_over,
    messages_of_all,
)
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.storage import StoragePath, StoreError, files_below, parallel_map, remove_tree, storage_path


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
    process, part_bytes = jax.process_index(), files.PART_BYTES
    plan = planned(arrays)
    contents = stream(arrays, plan, process)
    own_texts = {**texts, SHARDS: to_json(plan, part_bytes)} if process == 0 else {}

    def write() -> FileRecords:
        root.mkdir(parents=True, exist_ok=True)
        records = {name: files.write_part(root / name, [memoryview(text.encode())]) for name, text in own_texts.items()}
        records |= files.write_parts(root, f"{process:05d}", contents, part_bytes)
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


Tree = TypeVar("Tree")
Partial = bool | Callable[[dict], bool]


@dataclass(frozen=True)
class Restored(Generic[Tree]):
    """A restored checkpoint: its step, the template filled with its arrays, and its metadata."""

    step: int
    tree: Tree
    metadata: dict


class Checkpoints(Saver):
    """The checkpoints of one run, in one directory that all its processes share, or in one folder of a store.

    Every process of a `jax.distributed` run makes the same calls in the same order. Trees are pytrees of global
    jax.Arrays, with or without axis names; other leaves are static and are not saved. Reading does not change the
    directory. The first save removes unfinished checkpoints of killed processes.
    """

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, in ascending order."""
        return committed_steps(self._directory)

    def metadata(self, step: int) -> dict:
        """Return the metadata of a step's checkpoint; raise `UserError` if there is none or it cannot be read."""
        folder = self._existing(step)
        try:
            return read_metadata(folder)
        except UserError:
            raise
        except (OSError, ValueError, LookupError) as error:
            raise UserError(f"The checkpoint's metadata {folder / METADATA} cannot be read: {error}.") from error

    def latest(self, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree] | None:
        """Restore the newest intact checkpoint; return None if there is no checkpoint.

        Damaged checkpoints are reported and skipped. The arguments are those of `restore`. Raises `UserError` if all
        checkpoints are damaged, or the checkpoint does not match the template.
        """
        step = self.sound_step()
        return None if step is None else self.read(step, template, partial)

    def sound_step(self) -> int | None:
        """Return the step of the newest intact checkpoint, for `read`; None if there is no checkpoint.

        Damaged checkpoints, and newer ones without a manifest, are reported and skipped. Raises `UserError` if all
        checkpoints are damaged.
        """
        self.wait()
        damaged: list[tuple[int, str]] = []
        steps = json.loads(messages_of_all(json.dumps(by_first_process(self.steps, [])))[0])
        self._report_without_manifest(steps[-1] if steps else None)
        for step in reversed(steps):
            if (damage := self._damage(step)) is None:
                for other, text in damaged:
                    folder = self._directory / folder_name(other)
                    self._report(
                        f"The checkpoint of step {other} is damaged ({text} in {folder}); step {step} is used instead."
                    )
                return step
            damaged.append((step, damage))
        if damaged:
            found = "; ".join(f"{folder_name(step)}: {damage}" for step, damage in damaged)
            raise agreed(
                f"None of the checkpoints in {self._directory} is intact ({found}). Put back an intact copy of one, or "
                "begin a new run."
            )
        return None

    def restore(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restore one step into a template, from any mesh.

        - `step`: the step of the checkpoint.
        - `template`: a pytree like the saved one, of jax.ShapeDtypeStructs (or jax.Arrays) with the shardings to
          restore under; static leaves are returned unchanged. Or a function that makes it from the metadata.
        - `partial`: whether the template may lack saved leaves, which are then not read. Or a function that decides
          this from the metadata.

        Raises `UserError` if there is no such checkpoint, it is damaged, or it does not match the template.
        """
        self.check(step)
        return self.read(step, template, partial)

    def check(self, step: int) -> None:
        """Raise `UserError` if a step's checkpoint is absent or damaged; otherwise `read` can restore it."""
        self.wait()
        folder = self._existing(step)
        if damage := self._damage(step):
            raise UserError(f"The checkpoint {folder} is damaged: {damage}. There are the steps {self.steps()}.")

    def _existing(self, step: int) -> StoragePath:
        folder = self._directory / folder_name(step)
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"There is no checkpoint of step {step} in {self._directory}; there are: {there}.")
        return folder

    def _damage(self, step: int) -> str | None:
        """Return a text about the damage of a checkpoint, the same in all processes, which share the reading."""
        found, failed = None, None
        try:
            found = find_damage(self._directory / folder_name(step), jax.process_index(), jax.process_count())
        except UserError as error:  # a failing store is no damage; other checkpoints would fail too
            failed = str(error)
        except OSError as error:
            failed = f"The checkpoint of step {step} cannot be read: {os_error_text(error)}."
        if failed := first_message(failed):
            raise agreed(failed)
        return first_message(found)

    def _report_without_manifest(self, newest: int | None) -> None:
        """Report newer checkpoints without a manifest: a save was killed, or the manifest was deleted."""
        others = "There is no other one" if newest is None else f"The newest valid one is that of step {newest}"
        for name in by_first_process(lambda: without_manifest(self._directory), []):
            if (step := step_of(name) or 0) > (-1 if newest is None else newest):
                self._report(
                    f"The checkpoint of step {step} is not valid: {self._directory / name} has no "
                    f"{MANIFEST}, which a save writes last. {others}."
                )

    def read(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restore a checkpoint that is known to be intact; the arguments are those of `restore`."""
        root = root_of(self._directory / folder_name(step))
        saved = {name: LeafSpec.from_json(entry) for name, entry in json.loads((root / LEAVES).read_bytes()).items()}
        if isfunction(template):
            template = template(self.metadata(step))
        specs = specs_by_name(template)
        check_match(saved, specs, str(root.parent), partial(self.metadata(step)) if callable(partial) else partial)
        structs = arrays_by_name(template)
        stored = {name: struct for name, struct in structs.items() if not specs[name].is_empty}
        arrays = read_arrays(root, stored) if stored else {}
        for name, struct in structs.items():  # in the same order in every process
            if name not in stored:
                arrays[name] = jax.numpy.zeros(struct.shape, struct.dtype, device=sharding_of(struct))
        self._history = {step}
        return Restored(step, fill(template, arrays), self.metadata(step))


def read_arrays(root: StoragePath, structs: dict[str, jax.ShapeDtypeStruct | jax.Array]) -> dict[str, jax.Array]:
    """Read non-empty arrays of a checkpoint by name; each process reads only the rows that its devices need."""
    plan, part_bytes = from_json((root / SHARDS).read_bytes())
    buffers: dict[str, dict[Region, np.ndarray]] = {}
    jobs: list[tuple[RowRange, dict[Region, np.ndarray]]] = []
    for name, struct in structs.items():
        regions = wanted(sharding_of(struct), struct.shape)
        buffers[name] = {region: np.empty(region.shape, struct.dtype) for region in regions}
        found = (rows for shard in plan[name] for rows in rows_for(shard, regions, struct.dtype.itemsize))
        jobs += [(rows, buffers[name]) for rows in found]
    parallel_map(lambda job: _fill(root, part_bytes, *job), jobs)
    jobs.clear()  # frees each buffer as soon as its array exists

    def make(name: str, struct: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        regions = buffers.pop(name)
        return jax.make_array_from_callback(
            struct.shape, sharding_of(struct), lambda index: regions[region_of(index or (), struct.shape)]
        )

    return {name: make(name, struct) for name, struct in structs.items()}


def _fill(root: StoragePath, part_bytes: int, rows: RowRange, buffers: dict[Region, np.ndarray]) -> None:
    """Read rows of a shard and copy them into the buffers of the overlapping regions."""
    content = np.empty(rows.stop - rows.start, np.uint8)
    read_parts(content, root, f"{rows.process:05d}", part_bytes, rows.start)
    values = content.view(next(iter(buffers.values())).dtype).reshape(rows.region.shape)
    for region, buffer in buffers.items():
        if overlap := rows.region.overlap(region):
            buffer[overlap.within(region)] = values[overlap.within(rows.region)]
