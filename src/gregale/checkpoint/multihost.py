"""Communication among the processes of a run, for checkpoints and errors."""

import json
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax._src import distributed  # no public function waits in a thread
from jax.experimental import multihost_utils

from gregale.atomic_files import DISK_ERRORS, os_error_text
from gregale.checkpoint.manifest import FileRecords
from gregale.errors import UserError
from gregale.storage import StoragePath, parallel_map, write_bytes

T = TypeVar("T")

_HANDOVER = "checksums-of-process-"
_BLOCK_BYTES = 2048  # of a gathered text: a new length would be compiled
_BARRIER_MINUTES = 20


def barrier(name: str) -> None:
    """Wait until every process has called this. Unlike a collective on devices it may be called in a thread.

    - `name`: the same in every process, and used once.
    """
    if jax.process_count() > 1:
        client = distributed.global_state.client
        assert client is not None, "jax.distributed joins several processes"
        client.wait_at_barrier(name, _BARRIER_MINUTES * 60_000)


def first_message(message: str | None) -> str | None:
    """Return the message of the first process that has one, in every process; None if none has."""
    return next((text for text in messages_of_all(message or "") if text), None)


def messages_of_all(text: str) -> list[str]:
    """Return the messages of all processes, of any length, in the order of their numbers, in every process."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = [int(size) for size in np.asarray(multihost_utils.process_allgather(np.int32(encoded.size)))]
    mine = np.zeros(-(-max(1, *sizes) // _BLOCK_BYTES) * _BLOCK_BYTES, np.uint8)
    mine[: encoded.size] = encoded
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    return [bytes(row[:size]).decode() for row, size in zip(everyone, sizes, strict=True)]


def by_first_process(action: Callable[[], T], otherwise: T) -> T:
    """Run `action` in process 0 only and return its result there; return `otherwise` in the other processes.

    Raises `UserError` in all processes if the action raises a `UserError` or an error of the disk; see `agreed`.
    """
    result, failed = otherwise, None
    if jax.process_index() == 0:
        try:
            result = action()
        except UserError as error:
            failed = f"{error.exit_code} {error}"
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            failed = f"{UserError.exit_code} The run's directory cannot be written: {os_error_text(error)}."
    if failed := first_message(failed):
        code, _, message = failed.partition(" ")
        raise agreed(message, int(code))
    return result


def agreed(message: str, exit_code: int = UserError.exit_code) -> UserError:
    """Return an error that ends every process of a run; process 0 has the message, the others refer to process 0."""
    error = UserError(message if jax.process_index() == 0 else "process 0 ended the run and gave the reason.")
    error.exit_code = exit_code
    return error


def hand_over(folder: StoragePath, process: int, records: FileRecords) -> None:
    """Write a process's checksums for process 0, which collects them after a barrier."""
    write_bytes(folder / f"{_HANDOVER}{process}.json", json.dumps(records).encode())


def collect(folder: StoragePath, processes: int) -> FileRecords:
    """Read and remove the checksums of the other processes."""

    def read(process: int) -> FileRecords:
        path = folder / f"{_HANDOVER}{process}.json"
        try:
            records = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise OSError(f"process {process} did not write its part") from None
        path.unlink()
        return records

    found = parallel_map(read, range(1, processes))
    return {name: record for records in found for name, record in records.items()}
