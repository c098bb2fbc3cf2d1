"""`Checkpoints`, which saves and restores the checkpoints of a run, on a disk or in an object store."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isfunction
from typing import Any, Generic, TypeVar

import jax

from gregale.checkpoint.leaves import LeafSpec, arrays_by_name, check_match, fill, sharding_of, specs_by_name
from gregale.checkpoint.manifest import MANIFEST, find_damage, read_records, root_of
from gregale.checkpoint.multihost import agreed, by_first_process, first_message, from_first_process
from gregale.checkpoint.reading import read_arrays
from gregale.checkpoint.retention import (
    LEAVES,
    METADATA,
    CheckpointConfig,
    committed_steps,
    folder_name,
    step_of,
    without_manifest,
)
from gregale.checkpoint.saving import Notices, Saver
from gregale.errors import UserError
from gregale.storage import StoragePath, storage_path

_NONE = -1

Tree = TypeVar("Tree")
Partial = bool | Callable[[dict], bool]


@dataclass(frozen=True)
class Restored(Generic[Tree]):
    """A restored checkpoint.

    Attributes:
        step: the step of the checkpoint.
        tree: the template, filled with the checkpoint's arrays.
        metadata: the metadata of the checkpoint.
    """

    step: int
    tree: Tree
    metadata: dict


class Checkpoints:
    """The checkpoints of one run, in one directory that all its processes share, or in one folder of a store.

    Every process of a `jax.distributed` run makes the same calls in the same order. Trees are pytrees of global
    jax.Arrays, with or without axis names; other leaves are static and are not saved. Reading does not change the
    directory. The first save removes unfinished checkpoints of killed processes.
    """

    def __init__(
        self,
        directory: StoragePath | str,
        config: CheckpointConfig | None = None,
        report: Callable[[str], None] = print,
        committed: Callable[[int], None] = lambda step: None,
        check: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            directory: created by the first save.
            config: the retention rules.
            report: called in process 0 with one line for each committed, failed or damaged checkpoint, also from a
                thread.
            committed: called in the same way with the step of each committed checkpoint.
            check: called in the same way before each save and before its commit; raises if this process must not write
                to the run any more.
        """
        self._directory = (storage_path(directory) if isinstance(directory, str) else directory).absolute()
        self._report = report if jax.process_index() == 0 else lambda _: None
        notices = Notices(self._report, check, committed)
        self._saver = Saver(self._directory, config or CheckpointConfig(), notices)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, tree: Any, metadata: dict, beside: Callable[[], object] = lambda: None) -> None:
        """Save in the background; return once the arrays may be donated. Waits for an earlier save.

        A step that this object has already saved or resumed from is not written again. A failed save (for example on a
        full disk) is reported and its files are deleted. The run continues, with `failure` set until a save succeeds.

        Args:
            step: names the checkpoint.
            tree: pytree of global jax.Arrays.
            metadata: stored as JSON beside the arrays.
            beside: writes further data of the checkpoint to another path, in every process and in the background; if
                it raises, the save fails.

        Raises:
            UserError: an array of the tree contains NaN or an infinity; nothing is saved.
        """
        self._saver.save(step, tree, metadata, beside)

    def outdate(self, step: int) -> None:
        """Mark the checkpoint of a step as outdated: the next save of that step replaces it."""
        self._saver.wait()
        self._saver.history.discard(step)

    @property
    def failure(self) -> str | None:
        """The cause if the last save failed, the same in every process; None if it succeeded or is in flight."""
        return self._saver.failure

    def wait(self) -> None:
        """Wait until the save in flight, if any, is committed or has failed."""
        self._saver.wait()

    def close(self) -> None:
        """Wait, then end the threads, as the end of a `with` block does; no save or restore is possible afterwards."""
        self._saver.close()

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, in ascending order."""
        return committed_steps(self._directory)

    def metadata(self, step: int) -> dict:
        """Return the metadata of a step's checkpoint.

        Raises:
            UserError: there is no such checkpoint, or its metadata cannot be read.
        """
        folder = self._existing(step)
        try:
            return json.loads((self._root(step) / METADATA).read_bytes())
        except UserError:
            raise
        except (OSError, ValueError, LookupError, StopIteration) as error:
            raise UserError(f"The checkpoint's metadata {folder / METADATA} cannot be read: {error}.") from error

    def latest(self, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree] | None:
        """Restore the newest intact checkpoint; return None if there is no checkpoint.

        Damaged checkpoints are reported and skipped. The arguments are those of `restore`.

        Raises:
            UserError: all checkpoints are damaged, or the checkpoint does not match the template.
        """
        step = self.sound_step()
        return None if step is None else self.read(step, template, partial)

    def sound_step(self) -> int | None:
        """Return the step of the newest intact checkpoint, for `read`; None if there is no checkpoint.

        Damaged checkpoints, and newer ones without a manifest, are reported and skipped.

        Raises:
            UserError: all checkpoints are damaged.
        """
        self.wait()
        damaged: list[tuple[int, str]] = []
        step = newest = self._newest_below(None)
        self._report_without_manifest(newest)
        while step is not None:
            damage = self._damage(step)
            if damage is None:
                self._report_damaged(damaged, step)
                return step
            damaged.append((step, damage))
            step = self._newest_below(step)
        if damaged:
            found = "; ".join(f"{folder_name(step)}: {damage}" for step, damage in damaged)
            raise agreed(
                f"None of the checkpoints in {self._directory} is intact ({found}). Put back an intact copy of one, or "
                "begin a new run."
            )
        return None

    def restore(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restore one step into a template, from any mesh.

        Args:
            step: the step of the checkpoint.
            template: a pytree like the saved one, of jax.ShapeDtypeStructs (or jax.Arrays) with the shardings to
                restore under; static leaves are returned unchanged. Or a function that makes it from the metadata.
            partial: whether the template may lack saved leaves, which are then not read. Or a function that decides
                this from the metadata.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it does not match the template.
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

    def _root(self, step: int) -> StoragePath:
        folder = self._directory / folder_name(step)
        return root_of(folder, read_records(folder))

    def _newest_below(self, bound: int | None) -> int | None:
        steps = [step for step in by_first_process(self.steps, []) if bound is None or step < bound]
        newest = from_first_process(steps[-1] if steps else _NONE)
        return None if newest == _NONE else newest

    def _damage(self, step: int) -> str | None:
        """Return a text about the damage of a checkpoint, the same in all processes, which share the reading."""
        found, failed = None, None
        try:
            found = find_damage(self._directory / folder_name(step), jax.process_index(), jax.process_count())
        except UserError as error:  # a failing store or an old format is no damage; other checkpoints would fail too
            failed = str(error)
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

    def _report_damaged(self, damaged: list[tuple[int, str]], used: int) -> None:
        for step, damage in damaged:
            self._report(
                f"The checkpoint of step {step} is damaged ({damage} in {self._directory / folder_name(step)}); "
                f"step {used} is used instead."
            )

    def read(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restore a checkpoint that is known to be intact; the arguments are those of `restore`."""
        root = self._root(step)
        saved = {name: LeafSpec.from_json(entry) for name, entry in json.loads((root / LEAVES).read_bytes()).items()}
        if isfunction(template):
            template = template(self.metadata(step))
        wanted = specs_by_name(template)
        check_match(saved, wanted, str(root.parent), partial(self.metadata(step)) if callable(partial) else partial)
        structs = arrays_by_name(template)
        empty = {name: struct for name, struct in structs.items() if wanted[name].is_empty}
        stored = {name: struct for name, struct in structs.items() if not wanted[name].is_empty}
        arrays = read_arrays(root, stored) if stored else {}
        for name, struct in empty.items():  # they are not stored
            arrays[name] = jax.numpy.zeros(struct.shape, struct.dtype, device=sharding_of(struct))
        self._saver.history = {step}
        return Restored(step, fill(template, arrays), self.metadata(step))
