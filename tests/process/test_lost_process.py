"""Real processes that wait for one another in a compiled program; one is killed or stopped, the others say which."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gregale.distributed.liveness import EXIT_CODE
from tests.forked import Popen
from tests.ports import free_port

TIMEOUT_SECONDS = 4
HANG_SECONDS = 5

PROGRAM = f"""
import os
import sys
import time
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from gregale.errors import UserError
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices
from gregale.distributed.liveness import monitor_peers
from gregale.distributed.hang_detector import Phase

rank, processes, port, errs_at, hangs_at = map(int, sys.argv[1:])
bounds = dict(timeout_seconds={TIMEOUT_SECONDS}, hang_seconds={HANG_SECONDS} if hangs_at > 0 else None)
config = DistributedConfig(f"127.0.0.1:{{port}}", processes, rank, **bounds)
watch = start_devices(processes, config)
mesh = Mesh(np.asarray(jax.devices()), ("all",))
split, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
ones = jax.make_array_from_callback((processes,), split, lambda index: np.ones(processes, np.float32)[index])
add = jax.jit(lambda x: x.sum(), out_shardings=everywhere)
try:
    with monitor_peers(watch, lambda: "It goes on from there.") as progress:
        steps = 0
        while steps != errs_at:
            progress.at(steps + 1, Phase.TRAINING if steps else Phase.COMPILING)
            if rank == 1 and steps == hangs_at:
                time.sleep(3600)
            with progress.waiting():
                assert float(add(ones)) == processes
            steps += 1
            if steps == 1:
                print("pid", os.getpid(), flush=True)
            time.sleep(0.01)
        if rank == 1:
            raise UserError("text that only this process sees")
        add(ones).block_until_ready()
except UserError as error:
    sys.exit(str(error))
"""


class Job:
    """Processes that add up for ever, or until an error of one of them at a step, or until one hangs there."""

    def __init__(self, processes: int, errs_at: int = -1, hangs_at: int = -1):
        port = str(free_port())
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        self.processes = [
            Popen(
                [sys.executable, "-c", PROGRAM, str(rank), str(processes), port, str(errs_at), str(hangs_at)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]

    def wait_until_all_run(self) -> None:
        for process in self.processes:
            assert any(line.startswith("pid") for line in process.stdout), process.stderr.read()

    def left(self, process: int) -> tuple[int, str]:
        """Exit code and standard error of a process, when it has ended by itself."""
        _, err = self.processes[process].communicate(timeout=300)
        return self.processes[process].returncode, err

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def job(request):
    job = Job(*request.param)
    try:
        job.wait_until_all_run()
        yield job
    finally:
        job.end()


def message(job: Job, process: int, why: str) -> str:
    name = rf"process {process} \([\w.-]+, pid {job.processes[process].pid}\)"
    return rf"gregale: error: {name} {why}\. It goes on from there\.\n"


@pytest.mark.parametrize(
    ("job", "lost", "number", "why"),
    [
        ((3,), 1, signal.SIGKILL, "was lost: its connection closed"),
        ((2,), 0, signal.SIGKILL, "was lost: its connection closed"),
        ((2,), 0, signal.SIGSTOP, f"was lost: no sign of life for {TIMEOUT_SECONDS} s"),
    ],
    indirect=["job"],
    ids=["killed", "first killed", "first stopped"],
)
def test_a_lost_process_is_named_by_all_others(job, lost, number, why):
    job.processes[lost].send_signal(number)
    began = time.monotonic()
    for process in range(len(job.processes)):
        if process != lost:
            code, err = job.left(process)
            assert re.fullmatch(message(job, lost, why), err), err
            assert code == EXIT_CODE == 75
    assert time.monotonic() - began < TIMEOUT_SECONDS + 60, "the machine may be busy, but not as JAX waits"


@pytest.mark.parametrize("job", [(2, 1)], indirect=True)
def test_an_error_of_one_process_ends_the_others(job):
    code, err = job.left(0)
    why = f"ended with an error {TIMEOUT_SECONDS} s ago; its own output says which"
    assert re.fullmatch(message(job, 1, why), err), err
    assert code == 1
    assert job.left(1) == (2, "text that only this process sees\n"), "JAX does not wait for the others"


@pytest.mark.parametrize("job", [(3, -1, 5)], indirect=True)
def test_one_whose_main_thread_hangs_is_named_and_all_end(job):
    """Its signs of life go on; the others wait for it in a compiled program."""
    began = time.monotonic()
    name = rf"process 1 \([\w.-]+, pid {job.processes[1].pid}\)"
    why = rf"{name} hangs: it has been for \d+ s in step 6\. At most 5 s are given to a step, .*"
    for process in range(3):
        code, err = job.left(process)
        assert re.fullmatch(rf"gregale: error: {why}\. It goes on from there\.\n", err), err
        assert code == EXIT_CODE
    assert time.monotonic() - began < HANG_SECONDS + 60


ALONE = """
import sys
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices

start_devices(2, DistributedConfig(f"127.0.0.1:{sys.argv[1]}", 2, 0, join_seconds=1))
"""


def test_a_process_does_not_wait_for_ever_for_others_that_never_come():
    port = free_port()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", ALONE, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == EXIT_CODE
    last = f"process 1 of 2 did not come to 127.0.0.1:{port} within 1 s (distributed.join_seconds)."
    assert done.stderr.splitlines()[-1] == f"gregale: error: {last}"
