import json
import os
import subprocess
import sys
from threading import Event, Thread

import pytest

from gregale.atomic_files import machine
from gregale.data import build
from gregale.data.build import once
from gregale.errors import UserError
from gregale.storage import write_bytes
from gregale.storage.lease import LeaseRecord


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(build, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(build, "BEAT_SECONDS", 0.01)


@pytest.fixture(params=["disk", "store"])
def claim(tmp_path, request):
    return (tmp_path if request.param == "disk" else request.getfixturevalue("s3")) / "work.claim"


def of_another(**changes) -> bytes:
    """Return a claim as an earlier version wrote it."""
    return json.dumps({"machine": "elsewhere", "pid": 1, "token": "x", "beat": 0} | changes).encode()


def test_one_works_and_the_other_waits_for_it(claim):
    began, waits, done = Event(), Event(), []

    def work() -> None:
        began.set()
        assert waits.wait(60)
        done.append("work")

    one = Thread(target=once, args=(claim, work, lambda: bool(done)))
    one.start()
    assert began.wait(60)
    once(claim, lambda: done.append("again"), lambda: bool(done), waits.set)
    one.join()
    assert done == ["work"]
    assert not claim.is_file()


def test_a_claim_that_is_renewed_is_waited_for_and_one_that_stands_still_is_taken_over(claim, monkeypatch):
    monkeypatch.setattr(build, "LOST_SECONDS", 0.0)
    write_bytes(claim, of_another())
    beats, done = iter(range(1, 20)), []

    def waiting() -> None:
        if (beat := next(beats)) < 5:
            write_bytes(claim, of_another(beat=beat))

    once(claim, lambda: done.append(next(beats)), lambda: bool(done), waiting)
    assert done == [6], "it waited while the claim was renewed, and no longer"


def test_a_process_that_is_gone_from_this_machine_is_not_waited_for(claim):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    write_bytes(claim, of_another(machine=machine(), pid=int(gone.stdout)))
    done = []
    once(claim, lambda: done.append("work"), lambda: bool(done))
    assert done == ["work"]


def test_a_claim_is_renewed_while_its_process_works_and_goes_when_that_fails(claim):
    def work() -> None:
        while (found := LeaseRecord.read(claim)) is None or found.count < 2:
            pass
        raise UserError("not now")

    with pytest.raises(UserError, match="not now"):
        once(claim, work, lambda: False)
    assert not claim.is_file()


def test_what_the_parent_process_does_is_refused_and_what_is_done_is_not_claimed(claim):
    write_bytes(claim, of_another(machine=machine(), pid=os.getppid()))
    with pytest.raises(UserError, match=r"work\.claim: the parent process is at work. A script that calls this"):
        once(claim, lambda: None, lambda: False)
    once(claim, lambda: pytest.fail("done again"), lambda: True)
    write_bytes(claim, b"damaged")
    done = []
    once(claim, lambda: None, lambda: bool(done), lambda: done.append("by another"))
    assert done
