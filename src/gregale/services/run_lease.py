"""The lock of a run in an object store: an object that its holder writes anew every few seconds.

A store gives nothing back when a process ends. So the object `lock` says who holds it, and counts; who finds it waits
and sees whether it still counts, unless the holder was a process of this machine that is gone. It is made under the
condition that there is none, where the store offers conditions. One whose holder counts no more is written over, and
belongs to whoever is still in it a moment later. Who finds another in it has lost it, and must write no more: a process
that was cut off from the store for so long that it was taken for dead.
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
from threading import Event, Thread
from uuid import uuid4

from gregale.errors import Busy, UserError
from gregale.files import Holder, is_gone, machine
from gregale.storage import Place, Remote, StoreError

_PERIODS = 3.0  # without a count, after which a holder is taken for dead


@dataclass(frozen=True)
class _Lease:
    """What the object says."""

    host: str
    pid: int
    since: float
    machine: str  # which may have the name of another one
    token: str
    count: int = 0

    @staticmethod
    def of_this_process() -> _Lease:
        return _Lease(socket.gethostname(), os.getpid(), time.time(), machine(), uuid4().hex)

    @staticmethod
    def read(place: Remote) -> _Lease | None:
        """None: there is none, or none that can be read."""
        try:
            return _Lease(**json.loads(place.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, StoreError):
                raise
            return None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def holder(self) -> Holder:
        return Holder(self.host, self.pid, self.since)

    @property
    def is_of_nobody(self) -> bool:
        """Whether its process was one of this machine, and no process has its number now."""
        return self.machine == machine() and is_gone(self.pid)

    @property
    def is_of_a_dead_process(self) -> bool:
        """Whether its process was one of this machine, and is gone; asked by a process that holds no lease yet."""
        # This one's number: of an earlier process that had it, as in a container that starts anew.
        return self.is_of_nobody or (self.machine == machine() and self.pid == os.getpid())


class Held:
    """A lease that this process holds, until it loses it."""

    def __init__(self, place: Remote, lease: _Lease):
        self._place, self._lease = place, lease
        self.lost_to: Holder | None = None

    def check(self) -> None:
        """Raises `UserError` if the lease was lost; asks the store."""
        found = _Lease.read(self._place)
        if found is not None and found.token != self._lease.token:
            self.lost_to = found.holder
        if self.lost_to is not None:
            raise lost(self._place.parent, self.lost_to)

    def count(self) -> None:
        """Shows that the holder lives. Raises as `check`."""
        self.check()
        self._lease = replace(self._lease, count=self._lease.count + 1)
        self._place.write_bytes(self._lease.to_bytes())

    def give_back(self) -> None:
        found = _Lease.read(self._place)
        if found is not None and found.token == self._lease.token:
            self._place.unlink(missing_ok=True)


@contextmanager
def leased(
    place: Remote, refusal: Callable[[Holder], str], report: Callable[[str], None], beat_seconds: float
) -> Iterator[Held]:
    """Holds the lease at a place. A process that loses it is told by SIGTERM, as if somebody had stopped the run.

    - `refusal`: says that another process holds it
    - `beat_seconds`: time between two counts

    Raises `Busy` if another process holds it.
    """
    held = Held(place, _taken(place, refusal, report, beat_seconds))
    ended = Event()
    counting = Thread(target=_count, args=(held, ended, report, beat_seconds), daemon=True, name="run lease")
    counting.start()
    try:
        yield held
    finally:
        ended.set()
        counting.join(beat_seconds)
        with suppress(StoreError):  # then the next to come has to wait
            held.give_back()


def is_counting(place: Remote, silence_seconds: float) -> bool:
    """Whether the lease at a place has a holder that has counted of late, and is no dead process of this machine."""
    lease, modified = _Lease.read(place), place.modified()
    if lease is None or modified is None or lease.is_of_nobody:
        return False
    return time.time() - modified < silence_seconds


def _taken(
    place: Remote, refusal: Callable[[Holder], str], report: Callable[[str], None], beat_seconds: float
) -> _Lease:
    mine = _Lease.of_this_process()
    if place.create(mine.to_bytes()):
        other = _Lease.read(place)  # a store without conditions may have written over another's
        if other is not None and other.token == mine.token:
            return mine
    last = _Lease.read(place)
    if last is not None and not last.is_of_a_dead_process:
        seconds = _PERIODS * beat_seconds
        report(f"{place.parent} was last trained by {last.holder}; looking for {seconds:.0f} s whether it still is.")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(beat_seconds / 4)
            if _Lease.read(place) not in (None, last):
                raise Busy(refusal(last.holder))
    place.write_bytes(mine.to_bytes())
    time.sleep(beat_seconds / 10)  # of two who do the same, the first sees the second
    found = _Lease.read(place)
    if found is not None and found.token != mine.token:
        raise Busy(refusal(found.holder))
    return mine


def _count(held: Held, ended: Event, report: Callable[[str], None], seconds: float) -> None:
    while not ended.wait(seconds):
        try:
            held.count()
        except StoreError:
            continue  # out of order: others cannot take it either
        except UserError as error:
            stop(error, report)
            return


def lost(directory: Place, holder: Holder) -> UserError:
    """The error of a process that lost a run to another one."""
    return UserError(f"{directory} is being trained by {holder} now, who took this process for dead")


def stop(error: UserError, report: Callable[[str], None]) -> None:
    """Stops this process, which lost its run, as if somebody had sent SIGTERM."""
    report(f"{error}. This one stops.")
    os.kill(os.getpid(), signal.SIGTERM)
