"""One process trains a run, on a disk with locks or without and in a store; one that is gone keeps nobody from it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest

from gregale.atomic_files import acquire
from gregale.errors import Busy, UserError
from gregale.runs import run_lock
from gregale.runs.run_lock import LOCK, hold_run_lock
from gregale.storage import StoragePath, names
from gregale.storage.lease import HeldLease, LeaseRecord
from tests.disk import largest_file
from tests.waiting import until

BEAT_SECONDS = 0.2
LONG_BEAT_SECONDS = 4.0  # of a process that waits for another: on a busy machine that one counts late

HOLD = """
import sys, time
from gregale.runs.run_lock import hold_run_lock
from gregale.storage import storage_path
with hold_run_lock(storage_path(sys.argv[1]), beat_seconds=0.2):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(params=["disk", "disk without locks", "s3"])
def folder(request, tmp_path, monkeypatch) -> StoragePath:
    if request.param == "s3":
        return request.getfixturevalue("s3")
    if request.param == "disk without locks":
        monkeypatch.setattr(run_lock, "acquire", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    return tmp_path / "run"


def has_locks(folder: StoragePath) -> bool:
    return isinstance(folder, Path) and run_lock.acquire is acquire


def lease_in(folder: StoragePath) -> LeaseRecord:
    return LeaseRecord(**json.loads((folder / LOCK).read_bytes()))


def of_another_machine() -> LeaseRecord:
    return replace(LeaseRecord.of_this_process(), host="elsewhere", machine="elsewhere")


def give(folder: StoragePath, lease: LeaseRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK).write_bytes(lease.to_bytes())


def test_a_second_process_is_refused_until_the_first_is_gone(folder):
    with (
        subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as process,
        ExitStack() as at_end,
    ):
        at_end.callback(process.kill)
        assert process.stdout.readline() == b"held\n"
        reports: list[str] = []
        with pytest.raises(Busy) as caught, hold_run_lock(folder, reports.append, LONG_BEAT_SECONDS):
            pass
        assert f"{folder} is being trained by process {process.pid} on" in str(caught.value)
        assert time.strftime(", since %Y-") in str(caught.value)
        assert "Two processes would overwrite each other's checkpoints" in str(caught.value)
        waits = "waiting 12 s to see whether it still is"
        assert not reports if has_locks(folder) else waits in reports[0], "one that is locked is refused at once"
    reports.clear()
    with hold_run_lock(folder, reports.append, BEAT_SECONDS) as check:
        assert reports == [], "the process is gone from this machine: nothing to wait for"
        assert lease_in(folder).pid == os.getpid()
        check()
    assert names(folder) == [], "nothing is left"


def test_one_of_another_machine_is_waited_for(folder):
    give(folder, of_another_machine())
    reports: list[str] = []
    began = time.monotonic()
    with hold_run_lock(folder, reports.append, BEAT_SECONDS):
        assert time.monotonic() - began > 3 * BEAT_SECONDS
        assert f"{folder} was last trained by process {os.getpid()} on elsewhere" in reports[0]
        first = lease_in(folder).count
        until(lambda: lease_in(folder).count > first)


def test_one_of_another_machine_that_counts_is_noticed_where_its_lock_does_not_reach(tmp_path, monkeypatch):
    other = of_another_machine()
    give(tmp_path, other)
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: give(tmp_path, replace(other, count=1)))
    refused = pytest.raises(Busy, match=f"is being trained by process {os.getpid()} on elsewhere")
    with refused, hold_run_lock(tmp_path, print, LONG_BEAT_SECONDS):
        pass
    give(tmp_path, replace(other, host=LeaseRecord.of_this_process().host))
    reports: list[str] = []
    with hold_run_lock(tmp_path, reports.append):
        assert reports == [], "a process of this host, before it started anew, would have locked the file"


def take(folder: StoragePath, lease: LeaseRecord, check: Callable[[], None], has_ended: bool) -> None:
    """Gives the place to another; of its holder one count that was under way may come behind."""
    for _ in range(9):
        give(folder, lease)
        if has_ended:
            (folder / LOCK).unlink()
        check()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_another_took_for_dead_stops(folder, monkeypatch, has_ended):
    """As after a frozen host; that the other has ended since can be told where the file is locked."""
    if has_ended and not has_locks(folder):
        return
    signals: list[int] = []
    stopped = Event()
    monkeypatch.setattr(run_lock.os, "kill", lambda pid, number: (signals.append(number), stopped.set()))
    reports: list[str] = []
    with hold_run_lock(folder, reports.append, BEAT_SECONDS) as check:
        check()
        other = of_another_machine()
        with pytest.raises(UserError, match=rf"{folder}: this process lost the run's lease to {other}"):
            take(folder, other, check, has_ended)
        assert stopped.wait(60)
        if not has_ended:
            give(folder, other)
    assert signals == [signal.SIGTERM]
    assert reports[0].endswith("It stops.")
    assert names(folder) == ([] if has_ended else [LOCK]), "it is the other's to give back"


def test_of_two_that_take_a_dead_one_s_place_one_does(folder, monkeypatch):
    """The second writes over the first while that waits to see who is in it."""
    give(folder, of_another_machine())
    second = replace(of_another_machine(), pid=7)
    sleep = time.sleep

    def overtaken(seconds: float) -> None:
        if seconds == BEAT_SECONDS / 10:
            give(folder, second)
        else:
            sleep(0)

    monkeypatch.setattr(run_lock.time, "sleep", overtaken)
    monkeypatch.setattr(run_lock, "_PERIODS", 0.1)
    with (
        pytest.raises(UserError, match="is being trained by process 7 on elsewhere"),
        hold_run_lock(folder, print, BEAT_SECONDS),
    ):
        pass


def test_a_lease_that_is_gone_is_no_loss_and_a_full_disk_does_not_take_it(s3, tmp_path):
    held = HeldLease(s3 / LOCK, LeaseRecord.of_this_process())
    held.check()
    held.release()
    (s3 / LOCK).write_bytes(b"torn")
    held.check()
    give(tmp_path, mine := LeaseRecord.of_this_process())
    with largest_file(len(mine.to_bytes())):
        HeldLease(tmp_path / LOCK, mine).renew()
    assert lease_in(tmp_path).count == 1
