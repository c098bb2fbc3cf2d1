"""The lock of a run, which lets one process at a time train it, on any host.

The lock is a lease (see `run_lease`). On a disk its file is also locked (flock); the system releases that lock when the
process ends. Some network file systems do not pass that lock to other hosts, or only with certain mount options. The
lease works on all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

from gregale.atomic_files import NO_LOCKS, LockHeld, LockHolder, acquire, is_held
from gregale.errors import Busy
from gregale.runs.run_lease import hold_lease, is_renewed
from gregale.storage import StoragePath

LOCK = "lock"
BEAT_SECONDS = 10.0
TIMEOUT_SECONDS = 6 * BEAT_SECONDS  # maximum age of the lease of a running process on another host


@contextmanager
def training(
    directory: StoragePath, report: Callable[[str], None] = print, beat_seconds: float = BEAT_SECONDS
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run directory, which is created if absent.

    Yields a function that raises `UserError` if the lock was lost meanwhile. Call it before each commit that needs the
    lock.

    - `report`: called with one line for the user
    - `beat_seconds`: time between two renewals of the lease

    A process that loses the lock to another host gets SIGTERM; it was stopped for so long that its lease expired.

    Raises `Busy`, with host, process id and start time of the holder, if another process holds the lock.
    """
    refusal = partial(_refusal, directory)
    with (
        _locked(directory, refusal) as file,
        hold_lease(directory / LOCK, refusal, report, beat_seconds, file) as held,
    ):
        yield held.check


def is_being_trained(directory: StoragePath) -> bool:
    """Return whether a process trains the run now: it holds the file lock, or renewed the lease within a minute.

    For a process on another host only the lease is known, by the clocks of this host and of the disk or the store.
    """
    path = directory / LOCK
    return (isinstance(path, Path) and is_held(path)) or is_renewed(path, TIMEOUT_SECONDS)


def _locked(directory: StoragePath, refusal: Callable[[LockHeld], str]) -> IO[str] | nullcontext[None]:
    """Lock the lease's file; return an empty context in a store, or on a file system without locks."""
    directory.mkdir(parents=True, exist_ok=True)
    if not isinstance(directory, Path):
        return nullcontext()
    try:
        return acquire(directory / LOCK)
    except LockHeld as taken:
        raise Busy(refusal(taken)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return nullcontext()


def _refusal(directory: StoragePath, holder: LockHeld | LockHolder) -> str:
    return (
        f"{directory} is being trained by {holder}. Two processes would overwrite each other's checkpoints: stop that "
        f"process, or train under another name."
    )
