"""The lock of a run: a file or an object `lock` that its holder writes anew every few seconds.

Nothing is given back when a process ends. So the lease says who holds it, and counts; who finds it waits and sees
whether it still counts, unless the holder was a process of this machine that is gone. In a store it is made under the
condition that there is none, where the store offers conditions. One whose holder counts no more is written over, and
belongs to whoever is still in it a moment later. Who finds another in it has lost it, and must write no more: a process
that was cut off for so long that it was taken for dead. On a disk that has locks, `run_lock` locks the file first, so
that a process of the same host is refused, or takes it, at once.
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

_BYTES = 4096  # no lease has so many
_PERIODS = 3.0  # without a count, after which a holder is taken for dead


@dataclass(frozen=True)
class LeaseRecord:
    """What the file or the object says."""

    host: str
    pid: int
    since: float
    machine: str  # which may have the name of another one
    token: str
    count: int = 0

    @staticmethod
    def of_this_process() -> LeaseRecord:
        return LeaseRecord(socket.gethostname(), os.getpid(), time.time(), machine(), uuid4().hex)

    @staticmethod
    def parse(content: bytes) -> LeaseRecord | None:
        """None: it is no lease."""
        try:
            return LeaseRecord(**json.loads(content))
        except (ValueError, TypeError):
            return None

    @staticmethod
    def read(place: StoragePath) -> LeaseRecord | None:
        """None: there is none, or none that can be read."""
        try:
            return LeaseRecord.parse(place.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, place: StoragePath) -> None:
        if not isinstance(place, Path):
            place.write_bytes(self.to_bytes())
            return
        with place.open("r+b", buffering=0) as file:  # the file that is locked, and a full disk has room for it
            file.write(self.to_bytes())
            file.truncate()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def holder(self) -> LockHolder:
        return LockHolder(self.host, self.pid, self.since)

    @property
    def is_of_nobody(self) -> bool:
        """Whether its process was one of this machine, and no process has its number now."""
        return self.machine == machine() and is_process_dead(self.pid)

    @property
    def is_of_a_dead_process(self) -> bool:
        """Whether its process was one of this machine, and is gone; asked by a process that holds no lease yet."""
        # This one's number: of an earlier process that had it, as in a container that starts anew.
        return self.is_of_nobody or (self.machine == machine() and self.pid == os.getpid())


class RunLease:
    """A lease that this process holds, until it loses it; `locked`: the file, where it is locked too."""

    def __init__(self, place: StoragePath, lease: LeaseRecord, locked: IO[str] | None = None):
        self._place, self._lease, self._locked = place, lease, locked
        self.lost_to: LockHolder | None = None

    def check(self) -> None:
        """Raises `UserError` if the lease was lost; asks the disk or the store."""
        found = LeaseRecord.read(self._place)
        if found is None and self._locked is not None:  # another may have taken it, and removed it when it ended
            found = LeaseRecord.parse(os.pread(self._locked.fileno(), _BYTES, 0))
        if found is not None and found.token != self._lease.token:
            self.lost_to = found.holder
        if self.lost_to is not None:
            raise lost(self._place.parent, self.lost_to)

    def count(self) -> None:
        """Shows that the holder lives. Raises as `check`."""
        self.check()
        self._lease = replace(self._lease, count=self._lease.count + 1)
        self._lease.write(self._place)

    def give_back(self) -> None:
        found = LeaseRecord.read(self._place)
        if found is not None and found.token == self._lease.token:
            self._place.unlink(missing_ok=True)


@contextmanager
def hold_lease(
    place: StoragePath,
    refusal: Callable[[LockHolder], str],
    report: Callable[[str], None],
    beat_seconds: float,
    locked: IO[str] | None = None,
) -> Iterator[RunLease]:
    """Holds the lease at a place. A process that loses it is told by SIGTERM, as if somebody had stopped the run.

    - `refusal`: says that another process holds it
    - `beat_seconds`: time between two counts
    - `locked`: the file, where it is locked: no other process of this host has it

    Raises `Busy` if another process holds it.
    """
    held = RunLease(place, _taken(place, refusal, report, beat_seconds, locked is not None), locked)
    ended = Event()
    counting = Thread(target=_count, args=(held, ended, report, beat_seconds), daemon=True, name="run lease")
    counting.start()
    try:
        yield held
    finally:
        ended.set()
        counting.join(beat_seconds)
        with suppress(StoreError, OSError):  # then the next to come has to wait
            held.give_back()


def is_counting(place: StoragePath, silence_seconds: float) -> bool:
    """Whether the lease at a place has a holder that has counted of late, and is no dead process of this machine."""
    try:
        lease = LeaseRecord.read(place)
        modified = place.stat().st_mtime if isinstance(place, Path) else place.modified()
    except OSError:
        return False
    if lease is None or modified is None or lease.is_of_nobody:
        return False
    return time.time() - modified < silence_seconds


def _taken(
    place: StoragePath,
    refusal: Callable[[LockHolder], str],
    report: Callable[[str], None],
    beat_seconds: float,
    is_locked: bool,
) -> LeaseRecord:
    mine = LeaseRecord.of_this_process()
    if not is_locked and create(place, mine.to_bytes()):
        other = LeaseRecord.read(place)  # a store without conditions may have written over another's
        if other is not None and other.token == mine.token:
            return mine
    last = LeaseRecord.read(place)
    if is_locked and (last is None or last.host == mine.host):
        mine.write(place)
        return mine
    if last is not None and not last.is_of_a_dead_process:
        seconds = _PERIODS * beat_seconds
        report(f"{place.parent} was last trained by {last.holder}; looking for {seconds:.0f} s whether it still is.")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(beat_seconds / 4)
            if LeaseRecord.read(place) not in (None, last):
                raise Busy(refusal(last.holder))
    mine.write(place)
    time.sleep(beat_seconds / 10)  # of two who do the same, the first sees the second
    found = LeaseRecord.read(place)
    if found is not None and found.token != mine.token:
        raise Busy(refusal(found.holder))
    return mine


def _count(held: RunLease, ended: Event, report: Callable[[str], None], seconds: float) -> None:
    while not ended.wait(seconds):
        try:
            held.count()
        except (StoreError, OSError):
            continue  # out of order: others cannot take it either
        except UserError as error:
            stop(error, report)
            return


def lost(directory: StoragePath, holder: LockHolder) -> UserError:
    """The error of a process that lost a run to another one."""
    return UserError(f"{directory} is being trained by {holder} now, who took this process for dead")


def stop(error: UserError, report: Callable[[str], None]) -> None:
    """Stops this process, which lost its run, as if somebody had sent SIGTERM."""
    report(f"{error}. This one stops.")
    os.kill(os.getpid(), signal.SIGTERM)
