"""One process trains a run, also where locks do not reach."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from threading import Event, Thread

import pytest

from gregale.errors import Busy, UserError
from gregale.services import run_lease, run_lock
from gregale.services.run_lock import LOCK, training

HOLD = """
import sys, time
from pathlib import Path
from gregale.services.run_lock import training
with training(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError) as caught, training(tmp_path):
            pass
        assert f"{tmp_path} is being trained by process {process.pid} on {socket.gethostname()}" in str(caught.value)
        assert time.strftime(", since %Y-") in str(caught.value)
        process.send_signal(signal.SIGKILL)
    reports = []
    with training(tmp_path, reports.append):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not reports
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def other_host(tmp_path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"host": "another", "pid": 7, "since": 0.0}))


def test_another_host_that_was_lost_is_waited_for(tmp_path):
    other_host(tmp_path)
    reports = []
    with training(tmp_path, reports.append, beat_seconds=0.01):
        pass
    assert len(reports) == 1
    assert "was last trained by process 7 on another" in reports[0]


def test_another_host_that_still_trains_is_noticed_where_the_lock_does_not_reach(tmp_path):
    other_host(tmp_path)
    ended = Event()
    with open(tmp_path / LOCK) as file:
        touching = Thread(target=run_lock._beat, args=(file, ended, 0.05, lambda: None, print))
        touching.start()
        try:
            refused = pytest.raises(Busy, match="is being trained by process 7 on another")
            with refused, training(tmp_path, print, beat_seconds=4.0):
                pass
        finally:
            ended.set()
            touching.join()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_another_host_took_for_dead_stops(tmp_path, monkeypatch, has_ended):
    """As after a frozen host, on a file system whose locks end at the host."""
    signals: list[int] = []
    stopped = Event()
    monkeypatch.setattr(run_lease.os, "kill", lambda pid, number: (signals.append(number), stopped.set()))
    reports: list[str] = []
    with training(tmp_path, reports.append, beat_seconds=0.01) as check:
        check()
        other_host(tmp_path)
        if has_ended:
            (tmp_path / LOCK).unlink()
        assert stopped.wait(60)
        with pytest.raises(UserError, match=r"is being trained by process 7 on another, since .* now, who took this"):
            check()
    assert signals == [signal.SIGTERM]
    assert reports[0].endswith("This one stops.")
    assert (tmp_path / LOCK).exists() is not has_ended, "it is the other's to remove"


def test_the_holder_gives_signs_of_life(tmp_path):
    with training(tmp_path, print, beat_seconds=0.01):
        before = (tmp_path / LOCK).stat().st_mtime_ns
        until = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < until
            time.sleep(0.005)
