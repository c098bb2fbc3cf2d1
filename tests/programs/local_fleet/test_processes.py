"""The token of a fleet, and processes that end when they are told to."""

import subprocess
import sys

import pytest

from gregale.atomic_files import is_process_dead
from gregale.distributed.agreement import read_token
from gregale.errors import Busy
from gregale.islands.local_fleet import claimed, end, end_of, make_token
from tests.waiting import until


def test_a_token_is_made_once_and_can_be_read(tmp_path):
    path = tmp_path / "token"
    make_token(path)
    first = read_token(path, "islands.token_file")
    make_token(path)
    assert read_token(path, "islands.token_file") == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_command_for_a_fleet_is_refused_until_the_first_has_ended(tmp_path):
    with claimed(tmp_path), pytest.raises(Busy, match=r"another `gregale islands` \(process \d+"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_processes_end_and_those_that_have_ended_are_left():
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    end([sleeping, done])
    assert sleeping.returncode == -15


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    """Nothing may train on behind the back of whoever killed the command."""
    parent = f"""
import pathlib, time
from gregale.islands import local_fleet
local_fleet.GREGALE = ({sys.executable!r}, "-c", "import time; time.sleep(600)")
child = local_fleet.start([], pathlib.Path({str(tmp_path / "out")!r}))
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    until(lambda: is_process_dead(child))


def test_an_error_is_called_one_by_its_reader_alone(tmp_path):
    output = tmp_path / "log"
    output.write_text("words 1 kB/1 kB\n  step 1\nstep 2\nstep 3\n")
    assert end_of(output) == "step 1 step 2 step 3"
    output.write_text("step 1\ngregale: error: seed is 0 in the fleet,\nbut 5 in this island\n")
    assert end_of(output) == "seed is 0 in the fleet, but 5 in this island"


def test_a_lighthouse_that_does_not_start_says_why(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text("name: tiny\nsteps: 4\nsync: {type: diloco}\n")
    wrong = "from gregale.islands import local_fleet; local_fleet.GREGALE += ('--lighthouse',)"
    command = [sys.executable, "-c", f"{wrong}; from gregale.cli import main; main(['islands', 'tiny.yaml'])"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert said.startswith("gregale: error: the lighthouse did not start: there is no command `--lighthouse`.")
    assert said.count("error:") == 1
