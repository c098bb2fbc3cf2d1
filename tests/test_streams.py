"""A console that nobody reads any more is silent, and no reason to end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gregale.streams import LastingStream

# Standard output leads to a pipe without a reader, to a full disk, or to a file that may not grow.
PROGRAM = """
import sys
from gregale.services.tracking import Console

with Console() as console:
    console.begin(2)
    for step in (1, 2):
        console.log(step, {"loss": 1.0})
        console.message("x" * 100_000)
print("still here", file=sys.stderr)
"""


def without_a_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("where", ["pipe", "/dev/full"])
def test_a_process_goes_on_and_ends_well(where):
    stdout = without_a_reader() if where == "pipe" else os.open(where, os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(stdout)
    assert (done.returncode, done.stderr) == (0, "still here\n")


def test_everything_else_is_the_streams_own():
    file = os.fdopen(without_a_reader(), "w")
    stream = LastingStream(file)
    assert (stream.isatty(), stream.fileno(), stream.encoding) == (False, file.fileno(), file.encoding)
    for _ in range(2):
        assert stream.write("words") == 5
        stream.flush()
    file.close()
