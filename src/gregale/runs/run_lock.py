"""The lock of a run, which lets one process at a time train it, on any host.

The lock is a lease (`storage.lease`), `lock`. A process that finds a lease waits until it knows whether the counter
still increases, unless the holder has ended. An expired lease is overwritten; the process that the lease names a moment
later holds it. In a store with conditional requests, a lease is created only if there is none. A process that finds
another holder in its lease has lost it and must not write any more.

On a disk the file is also locked (flock), so that a process of the same host takes the lease or is rejected at once;
the system releases that lock when the process ends. Some network file systems do not pass that lock to other hosts, or
only with certain mount options. The lease works on all hosts.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from gregale.atomic_files import NO_LOCKS, LockHeld, LockHolder, acquire, is_held
from gregale.errors import Busy, UserError
from gregale.storage import StoragePath, create
from gregale.storage.lease import HeldLease, LeaseRecord

LOCK = "lock"
BEAT_SECONDS = 10.0
TIMEOUT_SECONDS = 6 * BEAT_SECONDS  # maximum age of the lease of a running process on another host
_PERIODS = 3.0  # number of intervals without a renewal after which a lease has expired


@contextmanager
def hold_run_lock(
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
    with _locked(directory) as file:
        lease = _take_lease(directory / LOCK, report, beat_seconds, file is not None)
        held = HeldLease(directory / LOCK, lease, "run's lease", file)

        def stop(error: UserError) -> None:
            report(f"{error}. It stops.")
            os.kill(os.getpid(), signal.SIGTERM)

        with held.renewing(beat_seconds, stop):
            yield held.check


def is_being_trained(directory: StoragePath) -> bool:
    """Return whether a process trains the run now: it holds the file lock, or renewed the lease within a minute.

    For a process on another host only the lease is known, by the clocks of this host and of the disk or the store.
    """
    path = directory / LOCK
    if isinstance(path, Path) and is_held(path):
        return True
    try:
        lease = LeaseRecord.read(path)
        modified = path.stat().st_mtime if isinstance(path, Path) else path.modified()
    except OSError:
        return False
    if lease is None or modified is None or lease.is_abandoned:
        return False
    return time.time() - modified < TIMEOUT_SECONDS


def _locked(directory: StoragePath) -> IO[str] | nullcontext[None]:
    """Lock the lease's file; return an empty context in a store, or on a file system without locks."""
    directory.mkdir(parents=True, exist_ok=True)
    if not isinstance(directory, Path):
        return nullcontext()
    try:
        return acquire(directory / LOCK)
    except LockHeld as taken:
        raise _refusal(directory, taken) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return nullcontext()


def _refusal(directory: StoragePath, holder: LockHeld | LockHolder) -> Busy:
    return Busy(
        f"{directory} is being trained by {holder}. Two processes would overwrite each other's checkpoints: stop that "
        f"process, or train under another name."
    )


def _take_lease(path: StoragePath, report: Callable[[str], None], beat_seconds: float, is_locked: bool) -> LeaseRecord:
    """Write this process's lease; raise `Busy` if another process holds it.

    - `is_locked`: whether this process has locked the file, so that no other process of this host has the lease
    """
    mine = LeaseRecord.of_this_process()
    if not is_locked and create(path, mine.to_bytes()):
        other = LeaseRecord.read(path)  # a store without conditional requests may have overwritten another lease
        if other is not None and other.token == mine.token:
            return mine
    last = LeaseRecord.read(path)
    if is_locked and (last is None or last.host == mine.host):
        mine.write(path)
        return mine
    # An earlier process may have had this process's id, as in a restarted container.
    is_own = last is not None and last.machine == mine.machine and last.pid == mine.pid
    if last is not None and not last.is_abandoned and not is_own:
        seconds = _PERIODS * beat_seconds
        report(f"{path.parent} was last trained by {last}; waiting {seconds:.0f} s to see whether it still is.")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(beat_seconds / 4)
            if LeaseRecord.read(path) not in (None, last):
                raise _refusal(path.parent, last)
    mine.write(path)
    time.sleep(beat_seconds / 10)  # if two processes write, the first one sees the lease of the second
    found = LeaseRecord.read(path)
    if found is not None and found.token != mine.token:
        raise _refusal(path.parent, found)
    return mine
