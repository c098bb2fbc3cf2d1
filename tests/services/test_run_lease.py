"""One process trains a run in a store; one that is gone does not keep others from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gregale.errors import UserError
from gregale.services import run_lease
from gregale.services.run_lease import Held, _Lease
from gregale.services.run_lock import LOCK, training

BEAT_SECONDS = 0.2
LONG_BEAT_SECONDS = 4.0  # of who waits for another: on a busy machine that one counts late

HOLD = """
import sys, time
from gregale.services.run_lock import training
from gregale.storage import place
with training(place(sys.argv[1]), beat_seconds=0.2):
    print("held", flush=True)
    time.sleep(1000)
"""


def says(folder) -> _Lease:
    return _Lease(**json.loads((folder / LOCK).read_bytes()))


def of_another_machine() -> _Lease:
    return replace(_Lease.of_this_process(), host="elsewhere", machine="elsewhere")


def test_a_second_process_is_refused_until_the_first_is_gone(s3):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(s3)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        reports: list[str] = []
        with pytest.raises(UserError) as caught, training(s3, reports.append, LONG_BEAT_SECONDS):
            pass
        assert f"{s3} is being trained by process {process.pid} on" in str(caught.value)
        assert "Two would write over each other's checkpoints" in str(caught.value)
        assert "looking for 12 s whether it still is" in reports[0]
        process.send_signal(signal.SIGKILL)
    reports.clear()
    with training(s3, reports.append, BEAT_SECONDS) as check:
        assert reports == [], "the process is gone from this machine: nothing to wait for"
        assert says(s3).pid == os.getpid()
        check()
    assert not (s3 / LOCK).exists()


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_one_of_another_machine_is_waited_for(kind, request):
    folder = request.getfixturevalue(kind)
    (folder / LOCK).write_bytes(of_another_machine().to_bytes())
    reports: list[str] = []
    began = time.monotonic()
    with training(folder, reports.append, BEAT_SECONDS):
        assert time.monotonic() - began > 3 * BEAT_SECONDS
        assert f"{folder} was last trained by process {os.getpid()} on elsewhere" in reports[0]
        first, until = says(folder).count, time.monotonic() + 60
        while says(folder).count == first:
            assert time.monotonic() < until, "it counts"
            time.sleep(BEAT_SECONDS)


def take(folder, lease: _Lease, check) -> None:
    """Gives the place to another; of its holder one count that was under way may come behind."""
    for _ in range(9):
        (folder / LOCK).write_bytes(lease.to_bytes())
        check()


def test_who_lost_it_is_told_and_stops(s3, monkeypatch):
    signals: list[int] = []
    monkeypatch.setattr(run_lease.os, "kill", lambda pid, number: signals.append(number))
    reports: list[str] = []
    with training(s3, reports.append, BEAT_SECONDS) as check:
        other, until = of_another_machine(), time.monotonic() + 60
        with pytest.raises(UserError, match=rf"{s3} is being trained by {other.holder} now, who took this process for"):
            take(s3, other, check)
        while not signals and time.monotonic() < until:
            time.sleep(0.02)
        assert signals == [signal.SIGTERM]
        (s3 / LOCK).write_bytes(other.to_bytes())
        assert reports[0].endswith("This one stops.")
    assert says(s3) == other, "it is the other's to give back"


def test_of_two_that_take_a_dead_one_s_place_one_does(s3, monkeypatch):
    """The second writes over the first while that waits to see who is in it."""
    (s3 / LOCK).write_bytes(of_another_machine().to_bytes())
    second = replace(of_another_machine(), pid=7)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if seconds < BEAT_SECONDS / 4:
            (s3 / LOCK).write_bytes(second.to_bytes())

    monkeypatch.setattr(run_lease.time, "sleep", sleep)
    monkeypatch.setattr(run_lease, "_PERIODS", 0.1)
    with (
        pytest.raises(UserError, match="is being trained by process 7 on elsewhere"),
        training(s3, print, BEAT_SECONDS),
    ):
        pass


def test_a_lease_that_is_gone_is_no_loss(s3):
    held = Held(s3 / LOCK, _Lease.of_this_process())
    held.check()
    held.give_back()
    (s3 / LOCK).write_bytes(b"torn")
    held.check()
