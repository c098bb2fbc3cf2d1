"""The lease of a run: a file or an object `lock` that its holder renews every few seconds.

A killed process does not release its lease. So the lease names its holder and has a counter. A process that finds a
lease waits until it knows whether the counter still increases, unless the holder was a process of this machine that has
ended. An expired lease is overwritten; the process that the lease names a moment later holds it. In a store with
conditional requests, a lease is created only if there is none. A process that finds another holder in its lease has
lost it and must not write any more; it was unreachable for so long that its lease expired. On a disk with locks,
`run_lock` first locks the file, so that a process of the same host takes the lease or is rejected at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import IO
from uuid import uuid4

from gregale.atomic_files import LockHolder, is_process_dead, machine
from gregale.errors import Busy, UserError
from gregale.storage import StoragePath, StoreError, create

_MAX_BYTES = 4096  # a lease is smaller
_PERIODS = 3.0  # number of intervals without a renewal after which a lease has expired


@dataclass(frozen=True)
class LeaseRecord:
    """The content of the file or the object."""

    host: str
    pid: int
    since: float
    machine: str  # identifies the machine, because two hosts may have the same name
    token: str
    count: int = 0

    @staticmethod
    def of_this_process() -> LeaseRecord:
        return LeaseRecord(socket.gethostname(), os.getpid(), time.time(), machine(), uuid4().hex)

    @staticmethod
    def parse(content: bytes) -> LeaseRecord | None:
        """Parse a lease; return None if the content is no lease."""
        try:
            return LeaseRecord(**json.loads(content))
        except (ValueError, TypeError):
            return None

    @staticmethod
    def read(path: StoragePath) -> LeaseRecord | None:
        """Read a lease; return None if it is absent or damaged."""
        try:
            return LeaseRecord.parse(path.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, path: StoragePath) -> None:
        if not isinstance(path, Path):
            path.write_bytes(self.to_bytes())
            return
        with path.open("r+b", buffering=0) as file:  # keeps the locked file, and works on a full disk
            file.write(self.to_bytes())
            file.truncate()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def holder(self) -> LockHolder:
        return LockHolder(self.host, self.pid, self.since)

    @property
    def is_abandoned(self) -> bool:
        """Whether the holder was a process of this machine, and no process has its id now."""
        return self.machine == machine() and is_process_dead(self.pid)

    @property
    def is_of_dead_process(self) -> bool:
        """Whether the holder was a process of this machine that has ended; for a process that holds no lease yet."""
        # An earlier process may have had this process's id, as in a restarted container.
        return self.is_abandoned or (self.machine == machine() and self.pid == os.getpid())


class RunLease:
    """A lease that this process holds until it loses it; `locked` is the lock file on a disk with locks."""

    def __init__(self, path: StoragePath, lease: LeaseRecord, locked: IO[str] | None = None):
        self._path, self._lease, self._locked = path, lease, locked
        self.lost_to: LockHolder | None = None

    def check(self) -> None:
        """Read the lease; raise `UserError` if this process has lost it."""
        found = LeaseRecord.read(self._path)
        if found is None and self._locked is not None:  # another process may have taken it, ended and removed it
            found = LeaseRecord.parse(os.pread(self._locked.fileno(), _MAX_BYTES, 0))
        if found is not None and found.token != self._lease.token:
            self.lost_to = found.holder
        if self.lost_to is not None:
            raise lost(self._path.parent, self.lost_to)

    def renew(self) -> None:
        """Increase the counter of the lease. Raises as `check`."""
        self.check()
        self._lease = replace(self._lease, count=self._lease.count + 1)
        self._lease.write(self._path)

    def release(self) -> None:
        """Delete the lease if this process still holds it."""
        found = LeaseRecord.read(self._path)
        if found is not None and found.token == self._lease.token:
            self._path.unlink(missing_ok=True)


@contextmanager
def hold_lease(
    path: StoragePath,
    refusal: Callable[[LockHolder], str],
    report: Callable[[str], None],
    beat_seconds: float,
    locked: IO[str] | None = None,
) -> Iterator[RunLease]:
    """Hold the lease at a path. A process that loses the lease gets SIGTERM, like a stop request.

    - `refusal`: returns the message for a lease that another process holds
    - `beat_seconds`: time between two renewals
    - `locked`: the lock file, if locked: no other process of this host has it

    Raises `Busy` if another process holds the lease.
    """
    held = RunLease(path, _acquire(path, refusal, report, beat_seconds, locked is not None), locked)
    ended = Event()
    renewing = Thread(target=_renew, args=(held, ended, report, beat_seconds), daemon=True, name="run lease")
    renewing.start()
    try:
        yield held
    finally:
        ended.set()
        renewing.join(beat_seconds)
        with suppress(StoreError, OSError):  # after a failure the next process waits until the lease expires
            held.release()


def is_renewed(path: StoragePath, timeout: float) -> bool:
    """Return whether the lease at a path was renewed within `timeout` seconds and its holder may be alive."""
    try:
        lease = LeaseRecord.read(path)
        modified = path.stat().st_mtime if isinstance(path, Path) else path.modified()
    except OSError:
        return False
    if lease is None or modified is None or lease.is_abandoned:
        return False
    return time.time() - modified < timeout


def _acquire(
    path: StoragePath,
    refusal: Callable[[LockHolder], str],
    report: Callable[[str], None],
    beat_seconds: float,
    is_locked: bool,
) -> LeaseRecord:
    mine = LeaseRecord.of_this_process()
    if not is_locked and create(path, mine.to_bytes()):
        other = LeaseRecord.read(path)  # a store without conditional requests may have overwritten another lease
        if other is not None and other.token == mine.token:
            return mine
    last = LeaseRecord.read(path)
    if is_locked and (last is None or last.host == mine.host):
        mine.write(path)
        return mine
    if last is not None and not last.is_of_dead_process:
        seconds = _PERIODS * beat_seconds
        report(f"{path.parent} was last trained by {last.holder}; waiting {seconds:.0f} s to see whether it still is.")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(beat_seconds / 4)
            if LeaseRecord.read(path) not in (None, last):
                raise Busy(refusal(last.holder))
    mine.write(path)
    time.sleep(beat_seconds / 10)  # if two processes write, the first one sees the lease of the second
    found = LeaseRecord.read(path)
    if found is not None and found.token != mine.token:
        raise Busy(refusal(found.holder))
    return mine


def _renew(held: RunLease, ended: Event, report: Callable[[str], None], seconds: float) -> None:
    while not ended.wait(seconds):
        try:
            held.renew()
        except (StoreError, OSError):
            continue  # the storage fails, so no other process can take the lease either
        except UserError as error:
            stop(error, report)
            return


def lost(directory: StoragePath, holder: LockHolder) -> UserError:
    """Return the error of a process that lost the lease of a run."""
    return UserError(f"{directory}: this process lost the run's lease to {holder}")


def stop(error: UserError, report: Callable[[str], None]) -> None:
    """Stop this process, which lost its lease, by SIGTERM."""
    report(f"{error}. It stops.")
    os.kill(os.getpid(), signal.SIGTERM)
