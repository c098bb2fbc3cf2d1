"""The token of a fleet, and processes that end when they are told to."""

from __future__ import annotations

import subprocess
import sys

from gregale.islands.engine.signing import read_token
from gregale.programs.islands.processes import end, make_token


def test_a_token_is_made_once_and_can_be_read(tmp_path):
    path = tmp_path / "token"
    make_token(path)
    first = read_token(path)
    make_token(path)
    assert read_token(path) == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_processes_end_and_those_that_have_ended_are_left(tmp_path):
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    end([sleeping, done])
    assert sleeping.returncode == -15
