"""`Checkpoints`, which saves and restores the checkpoints of a run, on a disk or in an object store."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isfunction
from typing import Generic, TypeVar

import jax
import numpy as np

from gregale.atomic_files import os_error_text
from gregale.checkpoint.leaves import LeafSpec, arrays_by_name, check_match, fill, sharding_of, specs_by_name
from gregale.checkpoint.manifest import LEAVES, MANIFEST, METADATA, SHARDS, find_damage, root_of
from gregale.checkpoint.multihost import agreed, by_first_process, first_message, messages_of_all
from gregale.checkpoint.parts import read_parts
from gregale.checkpoint.retention import committed_steps, folder_name, step_of, without_manifest
from gregale.checkpoint.saving import Saver
from gregale.checkpoint.shard_layout import Region, RowRange, from_json, region_of, rows_for, wanted
from gregale.errors import UserError
from gregale.storage import StoragePath, parallel_map

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
            return json.loads((root_of(folder) / METADATA).read_bytes())
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
