"""The lock of a run: one process trains it at a time, on whatever hosts.

It is an flock on the file `lock` of the run directory, which the system gives back when its process ends, however it
ends. Network file systems pass it on to other hosts, but not every one and not with every mount option. So the process
that holds it also touches the file every few seconds; who gets the lock though another host's name is still in it waits
and sees whether somebody touches it. In an object store it is a lease, see `run_lease`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import IO

from gregale.errors import Busy, UserError
from gregale.files import NO_LOCKS, Holder, Taken, acquire, holder_of, is_at, is_held, sign
from gregale.services.run_lease import is_counting, leased, lost, stop
from gregale.storage import Place, Remote

LOCK = "lock"
BEAT_SECONDS = 10.0
SILENCE_SECONDS = 6 * BEAT_SECONDS  # of somebody far away, who is gone then


@contextmanager
def training(
    directory: Place, report: Callable[[str], None] = print, beat_seconds: float = BEAT_SECONDS
) -> Iterator[Callable[[], None]]:
    """Holds the lock of a run directory, which is made if absent.

    Yields a function that raises `UserError` if the lock was lost meanwhile, to be called before what may only be
    written with it counts.

    - `report`: told in one line what the user should know
    - `beat_seconds`: time between two touches of the file

    A process that loses it to another host, where locks do not reach, gets SIGTERM: it was stopped for so long that it
    was taken for dead.

    Raises `Busy` if another process holds it, with its host, its number and since when.
    """
    if isinstance(directory, Remote):
        refusal = partial(_refusal, directory)
        with leased(directory / LOCK, refusal, report, beat_seconds) as held:
            yield held.check
        return
    with _locked(directory, report, beat_seconds) as check:
        yield check


@contextmanager
def _locked(directory: Path, report: Callable[[str], None], beat_seconds: float) -> Iterator[Callable[[], None]]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    try:
        file = acquire(path)
    except Taken as taken:
        raise Busy(_refusal(directory, taken)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        report(f"{path}: this file system has no locks, so nothing keeps a second process from training the run too.")
        yield lambda: None
        return
    with file:
        _check_other_host(file, directory, report, beat_seconds)
        check = partial(_check_own, file, path, sign(file))
        ended = Event()
        beating = Thread(target=_beat, args=(file, ended, beat_seconds, check, report), daemon=True, name="run lock")
        beating.start()
        try:
            yield check
        finally:
            ended.set()
            beating.join()
            with suppress(UserError):
                check()
                if is_at(file, path):
                    path.unlink()


def is_being_trained(directory: Place) -> bool:
    """Whether a process trains the run of a directory now: it holds the lock, or has touched it within a minute.

    Of a process on another host only the latter can be told, by the clocks of this host and of the disk or the store.
    """
    if isinstance(directory, Remote):
        return is_counting(directory / LOCK, SILENCE_SECONDS)
    path = directory / LOCK
    if is_held(path):
        return True
    try:
        with open(path, encoding="utf-8") as file:
            last = holder_of(file)
            touched = os.fstat(file.fileno()).st_mtime
    except OSError:
        return False
    return last is not None and last.host != Holder.this_process().host and time.time() - touched < SILENCE_SECONDS


def _refusal(directory: Place, holder: Taken | Holder) -> str:
    return (
        f"{directory} is being trained by {holder}. Two would write over each other's checkpoints: stop that process, "
        f"or train under another name."
    )


def _check_other_host(file: IO[str], directory: Path, report: Callable[[str], None], beat_seconds: float) -> None:
    """Raises `Busy` if the process of another host, which this lock does not reach, is still there."""
    last = holder_of(file)
    if last is None or last.host == Holder.this_process().host:
        return
    path, seconds = directory / LOCK, 2.5 * beat_seconds
    report(f"{directory} was last trained by {last}; looking for {seconds:.0f} s whether it still is.")
    before, until = _touched(path), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(beat_seconds / 10)
        if _touched(path) != before:
            raise Busy(_refusal(directory, Taken(last)))


def _check_own(file: IO[str], path: Path, mine: Holder) -> None:
    """Raises `UserError` if another process has put its name into a lock of this one."""
    try:
        with open(path, encoding="utf-8") as named:  # opening makes a network file system ask its server
            found = holder_of(named)
    except FileNotFoundError:
        found = holder_of(file)  # the other one has ended since, and has removed it
    if found is not None and found != mine:
        raise lost(path.parent, found)


def _touched(path: Path) -> int:
    with path.open("rb") as file:  # opening makes a network file system ask its server
        return os.fstat(file.fileno()).st_mtime_ns


def _beat(
    file: IO[str], ended: Event, seconds: float, check: Callable[[], None], report: Callable[[str], None]
) -> None:
    while not ended.wait(seconds):
        with suppress(OSError):
            try:
                check()
            except UserError as error:
                stop(error, report)
                return
            os.utime(file.fileno())
