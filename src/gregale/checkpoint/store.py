"""Saving and restoring checkpoints, on a disk or in an object store."""

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
    """A checkpoint that was read.

    Attributes:
        step: the step it was saved at.
        tree: the template, filled with its arrays.
        metadata: what was saved beside them.
    """

    step: int
    tree: Tree
    metadata: dict


class Checkpoints:
    """The checkpoints of one run, in one directory that all its processes share, or in one folder of a store.

    Every process of a `jax.distributed` run makes the same calls in the same order. Trees are pytrees of global
    jax.Arrays, with or without axis names; whatever else they hold is static and is not saved. Reading alone leaves the
    directory as it is; the first save removes what a killed process left unfinished.
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
            directory: made by the first save.
            config: what is kept.
            report: told in one line of each checkpoint that is committed or failed (in a thread) or damaged; process 0
                only.
            committed: called with the step of each checkpoint that is committed, likewise.
            check: called before each begins and before it is, likewise; raises if this process must not write to the
                run any more.
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
        """Saves in the background; returns once the arrays may be donated. Waits for an earlier save.

        A step that this object has saved already, or began from, is not written again. A save that fails, for want of
        room on the disk or whatever else, is reported and leaves nothing behind: the run goes on, with `failure` set
        until a save succeeds.

        Args:
            step: names the checkpoint.
            tree: pytree of global jax.Arrays.
            metadata: goes to JSON beside them.
            beside: writes elsewhere what belongs to the checkpoint, in every process and in the background: without
                it, if it raises, the checkpoint has failed.

        Raises:
            UserError: an array of the tree holds NaN or an infinity; nothing is saved.
        """
        self._saver.save(step, tree, metadata, beside)

    def outdate(self, step: int) -> None:
        """What is saved of a step is its state no longer: the next save of that step takes its place."""
        self._saver.wait()
        self._saver.history.discard(step)

    @property
    def failure(self) -> str | None:
        """Why the last save failed, the same in every process; None if it did not, or is still in flight."""
        return self._saver.failure

    def wait(self) -> None:
        """Waits until the save in flight, if any, is committed or has failed."""
        self._saver.wait()

    def close(self) -> None:
        """Waits, then frees the threads, as leaving a `with` block does; nothing may be saved or restored then."""
        self._saver.close()

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in ascending order."""
        return committed_steps(self._directory)

    def metadata(self, step: int) -> dict:
        """What was saved beside the arrays of a step.

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
        """Restores the newest sound checkpoint; None when there is no checkpoint at all.

        Damaged ones are reported and passed over. Arguments as for `restore`.

        Raises:
            UserError: there are checkpoints and none is sound, or it does not match the template.
        """
        step = self.sound_step()
        return None if step is None else self.read(step, template, partial)

    def sound_step(self) -> int | None:
        """The step of the newest sound checkpoint, for `read`; None when there is no checkpoint at all.

        Damaged ones, and newer ones without a manifest, are reported and passed over.

        Raises:
            UserError: there are checkpoints and none is sound.
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
                f"None of the checkpoints in {self._directory} is sound ({found}). Put back an intact copy of one, or "
                "begin a new run."
            )
        return None

    def restore(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restores one step into a template, whatever mesh it was saved from.

        Args:
            step: which checkpoint.
            template: a pytree like the one that was saved, of jax.ShapeDtypeStructs (or jax.Arrays) with the shardings
                to restore under; static leaves are handed back as they are. Or a function that makes it from what
                was saved beside the arrays.
            partial: the template may ask for a part of what was saved; only this is read. Or a function that says so
                of what was saved beside the arrays.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it does not match the template.
        """
        self.check(step)
        return self.read(step, template, partial)

    def check(self, step: int) -> None:
        """Raises `UserError` if there is no checkpoint of a step, or it is damaged; else it can be given to `read`."""
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
        """What is wrong with a checkpoint; the processes share the reading and agree on the answer."""
        found, failed = None, None
        try:
            found = find_damage(self._directory / folder_name(step), jax.process_index(), jax.process_count())
        except UserError as error:  # a store that fails, an old format: no damage, and no other would be better
            failed = str(error)
        if failed := first_message(failed):
            raise agreed(failed)
        return first_message(found)

    def _report_without_manifest(self, newest: int | None) -> None:
        """Reports what lies after the newest one that counts: a save was killed, or a manifest was deleted."""
        others = "There is no other one" if newest is None else f"The newest one that counts is that of step {newest}"
        for name in by_first_process(lambda: without_manifest(self._directory), []):
            if (step := step_of(name) or 0) > (-1 if newest is None else newest):
                self._report(
                    f"The checkpoint of step {step} does not count: {self._directory / name} has no "
                    f"{MANIFEST}, which a save writes last. {others}."
                )

    def _report_damaged(self, damaged: list[tuple[int, str]], used: int) -> None:
        for step, damage in damaged:
            self._report(
                f"The checkpoint of step {step} is damaged ({damage} in {self._directory / folder_name(step)}); "
                f"step {used} is used instead."
            )

    def read(self, step: int, template: Tree | Callable[[dict], Tree], partial: Partial = False) -> Restored[Tree]:
        """Restores a checkpoint that is known to be sound; arguments as for `restore`."""
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
