"""Writing a checkpoint: in the background, whole or not at all, and never a state that is not finite."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import jax

from gregale.atomic_files import os_error_text
from gregale.checkpoint.finite import listed, not_finite
from gregale.checkpoint.leaves import arrays_by_name, specs_by_name
from gregale.checkpoint.manifest import FileRecords
from gregale.checkpoint.multihost import barrier, first_message, hand_over, messages_of_all
from gregale.checkpoint.retention import (
    LEAVES,
    METADATA,
    CheckpointConfig,
    committed_steps,
    folder_name,
    superfluous,
)
from gregale.checkpoint.writing import commit, delete, discard, make_room, prepare
from gregale.errors import UserError
from gregale.storage import StoragePath, StoreError


@dataclass(frozen=True)
class Notices:
    """What process 0 calls, mostly in a thread: a line for the user; before a save and before it counts; after it."""

    report: Callable[[str], None]
    check: Callable[[], None]
    committed: Callable[[int], None]


class _Failure(NamedTuple):
    """Why something failed: `fact` for a line of the run, `message` with what would help for the error that ends it."""

    fact: str
    message: str


class Saver:
    """Saves the checkpoints of a run, one at a time; `Checkpoints` describes what is saved and how.

    Every process makes the same calls in the same order. `failure` is why the last save failed, None if it did not.
    """

    def __init__(self, directory: StoragePath, config: CheckpointConfig, notices: Notices):
        self._directory, self._config, self._notices = directory, config, notices
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
        leaves = {name: spec.to_json() for name, spec in specs_by_name(tree).items()}
        texts = {LEAVES: json.dumps(leaves, indent=1), METADATA: json.dumps(metadata, indent=1)}
        stored = {name: array for name, array in arrays_by_name(tree).items() if array.size > 0}
        size = sum(array.nbytes for array in stored.values())
        # No other save has this folder, in which every process writes.
        root = self._directory / folder_name(step) / messages_of_all(uuid4().hex[:8])[0]
        # A process that lost the run must not remove what the new one is writing.
        for action in (self._check, lambda: self._make_room(size)):
            failed = _failure_of(action)
            if failed and jax.process_index() == 0:
                self._give_up(step, root, failed)
            self.failure = first_message(failed.message if failed else None)
            if self.failure:
                return
        writing: list[Callable[[], FileRecords]] = []
        failed = _failure_of(lambda: writing.append(prepare(root, stored, texts)))
        self._in_flight = step, self._thread.submit(self._commit, step, root, writing, failed, beside)

    def wait(self) -> None:
        """As `Checkpoints.wait`."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        self.failure = first_message(future.result())
        if not self.failure:
            self.history.add(step)

    def close(self) -> None:
        """Waits, without the other processes, and frees the threads."""
        self._thread.shutdown()

    def _check(self) -> None:
        if jax.process_index() == 0:
            self._notices.check()

    def _make_room(self, size: int) -> None:
        if jax.process_index() == 0:
            make_room(self._directory, size)

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
        failed: _Failure | None,
        beside: Callable[[], object],
    ) -> str | None:
        """In the background: writes the files, has the checkpoint count, deletes old ones.

        Takes why it failed so far and returns why it failed, as far as this process knows.
        """
        records: FileRecords = {}

        def write() -> None:
            records.update(writing.pop()())  # then nothing refers to the copies of the arrays
            beside()
            if jax.process_index() > 0:
                hand_over(root, jax.process_index(), records)

        failed = failed or _failure_of(write)
        barrier(f"{root} has its checksums, save {self._saves}")
        if jax.process_index() == 0:
            failed = failed or _failure_of(self._check)
            failed = failed or _failure_of(lambda: commit(root, records))
            if failed:
                self._give_up(step, root, failed)
            else:
                self._notices.report(f"The checkpoint of step {step} is saved.")
                self._tidy(step)
        barrier(f"{root} is committed, save {self._saves}")
        return failed.message if failed else None

    def _tidy(self, saved: int) -> None:
        """Notes what was saved and deletes old checkpoints; that it fails is worth a line, no more."""

        def tidy() -> None:
            self._notices.committed(saved)
            for old in superfluous(committed_steps(self._directory), saved, self._config):
                delete(self._directory / folder_name(old))

        if failed := _failure_of(tidy):
            self._notices.report(f"Old checkpoints in {self._directory} were not deleted: {failed.fact}.")

    def _give_up(self, step: int, root: StoragePath, failed: _Failure) -> None:
        """Frees the room that a failed save takes, and says so."""
        discard(root)
        self._notices.report(f"The checkpoint of step {step} could not be saved: {failed.fact}. {self._newest()}.")

    def _newest(self) -> str:
        try:
            steps = committed_steps(self._directory)
        except UserError:  # the store cannot be asked: likely why
            return "The earlier ones are as they were"
        return f"The newest one is that of step {steps[-1]}" if steps else "There is no earlier one"


def _failure_of(action: Callable[[], object]) -> _Failure | None:
    """Why an action failed, in a few words; None if it did not."""
    try:
        action()
    except StoreError as error:
        return _Failure(error.fact.rstrip("."), str(error).rstrip("."))
    except UserError as error:
        fact = str(error).rstrip(".")
    except Exception as error:
        fact = os_error_text(error)
    else:
        return None
    return _Failure(fact, fact)
