"""The lock of a run: one process trains it at a time, on whatever hosts.

It is a lease, see `run_lease`. On a disk its file is locked too (flock), which the system gives back when the process
ends, however it ends. Network file systems pass that lock on to other hosts, but not every one and not with every mount
option; the lease reaches them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

from gregale.atomic_files import NO_LOCKS, LockHeld, LockHolder, acquire, is_held
from gregale.errors import Busy
from gregale.runs.run_lease import hold_lease, is_counting
from gregale.storage import StoragePath

LOCK = "lock"
BEAT_SECONDS = 10.0
SILENCE_SECONDS = 6 * BEAT_SECONDS  # of somebody far away, who is gone then


@contextmanager
def training(
    directory: StoragePath, report: Callable[[str], None] = print, beat_seconds: float = BEAT_SECONDS
) -> Iterator[Callable[[], None]]:
    """Holds the lock of a run directory, which is made if absent.

    Yields a function that raises `UserError` if the lock was lost meanwhile, to be called before what may only be
    written with it counts.

    - `report`: told in one line what the user should know
    - `beat_seconds`: time between two signs of life

    A process that loses it to another host gets SIGTERM: it was stopped for so long that it was taken for dead.

    Raises `Busy` if another process holds it, with its host, its number and since when.
    """
    refusal = partial(_refusal, directory)
    with (
        _locked(directory, refusal) as file,
        hold_lease(directory / LOCK, refusal, report, beat_seconds, file) as held,
    ):
        yield held.check


def is_being_trained(directory: StoragePath) -> bool:
    """Whether a process trains the run of a directory now: it has locked the lease, or counted within a minute.

    Of a process on another host only the latter can be told, by the clocks of this host and of the disk or the store.
    """
    path = directory / LOCK
    return (isinstance(path, Path) and is_held(path)) or is_counting(path, SILENCE_SECONDS)


def _locked(directory: StoragePath, refusal: Callable[[LockHeld], str]) -> IO[str] | nullcontext[None]:
    """The lease's file, locked; None in a store, or on a file system without locks."""
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
        f"{directory} is being trained by {holder}. Two would write over each other's checkpoints: stop that process, "
        f"or train under another name."
    )
