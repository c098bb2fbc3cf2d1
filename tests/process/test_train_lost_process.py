"""`gregale train` in two processes: one is told to end, one is killed."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from gregale.services.peers import EXIT_CODE
from tests.ports import free_port
from tests.programs.tiny import checkpoint_steps, finished, lines, saved_state, start_train, write_inputs

SETTINGS = [
    *["--steps", "100000", "--cpu_devices", "2", "--mesh.data", "1", "--mesh.model", "1"],
    *["--checkpoint.every", "20", "--distributed.processes", "2"],
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def job(inputs):
    """Two processes that train, and have saved since they were started."""
    saved = checkpoint_steps(inputs / "runs" / "tiny") if (inputs / "runs").exists() else [0]
    join = [*SETTINGS, "--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.process"]
    processes = [start_train(inputs, *join, str(rank)) for rank in range(2)]
    try:
        until = time.monotonic() + 300
        while not (new := checkpoint_steps(inputs / "runs" / "tiny")) or new[-1] <= saved[-1]:
            assert all(process.poll() is None for process in processes), [finished(process) for process in processes]
            assert time.monotonic() < until
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_signal_to_one_saves_and_ends_both(inputs, job: list[subprocess.Popen]):
    job[1].send_signal(signal.SIGTERM)
    (first, out, _), (second, *_) = (finished(process) for process in job)
    assert (first, second) == (143, 143)
    (step,) = re.findall(r"Stopped by SIGTERM after step (\d+) and saved; the same command goes on from there\.", out)
    run = inputs / "runs" / "tiny"
    assert checkpoint_steps(run)[-1] == lines(run)[-1]["step"] == int(step)


def test_the_other_names_one_that_is_lost_and_the_newest_checkpoint_is_sound(inputs, job: list[subprocess.Popen]):
    job[1].kill()
    code, _, err = finished(job[0])
    assert code == EXIT_CODE, err
    run = inputs / "runs" / "tiny"
    step = checkpoint_steps(run)[-1]
    lost = rf"process 1 \([\w.-]+, pid {job[1].pid}\) was lost: its connection closed"
    goes_on = rf"The newest checkpoint is that of step {step}; the same command goes on from there"
    assert re.fullmatch(rf"gregale: error: {lost}\. {goes_on}\.\n", err), err
    assert all(np.isfinite(array).all() for array in saved_state(run, step).values())
