import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import os, sys, time
from gregale.distributed.devices import end_with_parent
end_with_parent(9, int(sys.argv[1]) or None)
print("here", os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid() if sys.argv[2] == "named" else 0)])
time.sleep(60)
"""


def is_there(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("named", ["named", "not named"])
def test_it_ends_when_its_parent_is_killed(named):
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, named], stdout=subprocess.PIPE, text=True) as parent:
        word, number = parent.stdout.readline().split()
        assert word == "here"
        assert is_there(int(number))
        parent.kill()
        until = time.monotonic() + 30
        while is_there(int(number)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not is_there(int(number))


def test_it_ends_at_once_if_its_parent_is_gone_already():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run([sys.executable, "-c", CHILD, str(gone.pid)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
