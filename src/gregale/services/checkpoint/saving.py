"""Writing a checkpoint: in the background, whole or not at all, and never a state that is not finite."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from rich.filesize import decimal

from gregale.errors import UserError
from gregale.files import reason
from gregale.services.checkpoint.finite import listed, not_finite
from gregale.services.checkpoint.leaves import arrays_by_name, specs_by_name
from gregale.services.checkpoint.manifest import FileRecords, files_below, record, write_manifest
from gregale.services.checkpoint.processes import barrier, collect, first_message, hand_over, hashed_by, is_handover
from gregale.services.checkpoint.retention import (
    LEAVES,
    METADATA,
    CheckpointConfig,
    arrays_name,
    committed_steps,
    folder_name,
    superfluous,
    unfinished,
)

_REMOVAL_SECONDS = 5.0


class Saver:
    """Saves the checkpoints of a run, one at a time; `Checkpoints` describes what is saved and how.

    Every process makes the same calls in the same order. `failure` is why the last save failed, None if it did not.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        orbax: ocp.AsyncCheckpointer,
        report: Callable[[str], None],
        committed: Callable[[int], None],
    ):
        self._directory, self._config, self._orbax = directory, config, orbax
        self._report, self._committed = report, committed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[int, Future] | None = None
        self._saves = 0
        self.history: set[int] = set()  # steps that were saved, or that the run began from
        self.failure: str | None = None

    def save(self, step: int, tree: Any, metadata: dict, beside: Callable[[], object]) -> None:
        """As `Checkpoints.save`."""
        self.wait()
        if step in self.history:
            return
        self._check_finite(step, tree)
        self._saves += 1
        partial = self._directory / f"{folder_name(step)}.partial"
        leaves = {name: spec.to_json() for name, spec in specs_by_name(tree).items()}
        texts = {LEAVES: json.dumps(leaves, indent=1), METADATA: json.dumps(metadata, indent=1)}
        stored = {name: array for name, array in arrays_by_name(tree).items() if array.size > 0}
        size = sum(array.nbytes for array in stored.values())
        self.failure = first_message(self._begin(step, partial, texts, size) if jax.process_index() == 0 else None)
        if self.failure:
            return
        arguments = ocp.args.PyTreeSave(stored)
        failed = _failure_of(lambda: self._orbax.save(partial / arrays_name(step), args=arguments))
        self._in_flight = step, self._thread.submit(self._commit, step, partial, failed, beside)

    def wait(self) -> None:
        """As `Checkpoints.wait`."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        self.failure = first_message(future.result())
        if not self.failure:
            self.history.add(step)

    def close(self) -> None:
        """Waits, without the other processes, and frees the thread."""
        self._thread.shutdown()
        if self.failure and jax.process_index() == 0:
            for path in unfinished(self._directory):  # what threads of a failed save wrote after it had been given up
                _remove(path)

    def _check_finite(self, step: int, tree: Any) -> None:
        if names := not_finite(tree):
            raise UserError(
                f"After step {step}, {len(names)} arrays of the state hold NaN or infinity ({listed(names)}), so no "
                f"checkpoint is made of it. {self._newest()}. A lower optimizer.learning_rate, a longer warm-up or a "
                f"smaller optimizer.clip_norm may help."
            )

    def _begin(self, step: int, partial: Path, texts: dict[str, str], size: int) -> str | None:
        """Makes the folder, after removing what a killed process left unfinished (process 0, with nothing in flight).

        Returns why it failed, if it did. `size`: of the arrays, in bytes.
        """

        def make() -> None:
            for path in unfinished(self._directory):
                shutil.rmtree(path)
            partial.mkdir(parents=True)
            disk = shutil.disk_usage(partial)
            if disk.free < size and disk.total:
                words = f"{os.strerror(errno.ENOSPC)}, it needs {decimal(size)} and {decimal(disk.free)} are free"
                raise OSError(errno.ENOSPC, words)
            for name, text in texts.items():
                (partial / name).write_text(text)

        failed = _failure_of(make)
        if failed:
            self._give_up(step, partial, failed)
        return failed

    def _commit(self, step: int, partial: Path, failed: str | None, beside: Callable[[], object]) -> str | None:
        """In the background: waits for Orbax, adds the checksums, gives the folder its name, deletes old ones.

        Takes and returns why it failed, as far as this process knows.
        """
        records: FileRecords = {}
        failed = failed or _failure_of(lambda: records.update(self._written(partial, beside)))
        barrier(f"{partial} has its checksums, save {self._saves}")
        if jax.process_index() == 0:
            failed = failed or _failure_of(lambda: self._publish(step, partial, records))
            if failed:
                self._give_up(step, partial, failed)
            else:
                self._report(f"The checkpoint of step {step} is saved.")
                self._tidy(step)
        barrier(f"{partial} is committed, save {self._saves}")
        return failed

    def _written(self, partial: Path, beside: Callable[[], object]) -> FileRecords:
        """Waits for Orbax, then writes what is beside.

        Returns the checksums of what this process wrote, which are also handed over to process 0.
        """
        self._orbax.wait_until_finished()
        beside()
        process, processes = jax.process_index(), jax.process_count()
        lasting = [name for name in files_below(partial) if not is_handover(name)]
        records = record(partial, [name for name in lasting if hashed_by(name, processes) == process])
        if process > 0:
            hand_over(partial, process, records)
        return records

    def _publish(self, step: int, partial: Path, records: FileRecords) -> None:
        records = records | collect(partial, jax.process_count())
        # A network file system may have shown another process its own files too late.
        records |= record(partial, [name for name in files_below(partial) if name not in records])
        write_manifest(partial, records)
        committed = self._directory / folder_name(step)
        if committed.exists():  # damaged, or written by a run that this one does not continue
            self._delete(step)
        os.rename(partial, committed)

    def _tidy(self, saved: int) -> None:
        """Notes what was saved and deletes old checkpoints; that it fails is worth a line, no more."""

        def tidy() -> None:
            self._committed(saved)
            for old in superfluous(committed_steps(self._directory), saved, self._config):
                self._delete(old)

        if failed := _failure_of(tidy):
            self._report(f"Old checkpoints in {self._directory} were not deleted: {failed}.")

    def _give_up(self, step: int, partial: Path, failed: str) -> None:
        """Frees the room that a failed save takes, and says so."""
        _remove(partial)
        self._report(f"The checkpoint of step {step} could not be saved: {failed}. {self._newest()}.")

    def _newest(self) -> str:
        steps = committed_steps(self._directory)
        return f"The newest one is that of step {steps[-1]}" if steps else "There is no earlier one"

    def _delete(self, step: int) -> None:
        """Takes the name away first, so that a checkpoint is there in full or not at all."""
        name = folder_name(step)
        doomed = self._directory / f"{name}.deleted"
        os.rename(self._directory / name, doomed)
        shutil.rmtree(doomed)


def _remove(folder: Path) -> None:
    """Removes a folder into which other threads of a failed save may still write for a moment."""
    until = time.monotonic() + _REMOVAL_SECONDS
    while folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def _failure_of(action: Callable[[], object]) -> str | None:
    """Why an action failed, in a few words; None if it did not."""
    try:
        action()
    except Exception as error:  # Orbax and TensorStore have no common type for a disk that takes no more
        return reason(error)
    return None
