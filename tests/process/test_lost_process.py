"""Real processes that wait for one another in a compiled program; one is killed or fails, the others say which."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from gregale.distributed.liveness import EXIT_CODE
from tests.forked import Popen
from tests.ports import free_port
from tests.programs.tiny import finished

TIMEOUT_SECONDS = 4

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
from gregale.distributed.liveness import Phase

rank, processes, port, errs_at = map(int, sys.argv[1:])
config = DistributedConfig(f"127.0.0.1:{{port}}", processes, rank, timeout_seconds={TIMEOUT_SECONDS})
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


@contextmanager
def running(processes: int, errs_at: int = -1):
    """Processes that add up for ever, or until one of them fails at a step."""
    port, environment = str(free_port()), os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(processes)] for rank in range(processes)]
    job = [Popen([*command, port, str(errs_at)], env=environment, **streams) for command in commands]
    try:
        for process in job:
            assert any(line.startswith("pid") for line in process.stdout), process.stderr.read()
        yield job
    finally:
        for process in job:
            process.kill()
            process.communicate()


def message(number: int, process: subprocess.Popen, why: str) -> str:
    name = rf"process {number} \([\w.-]+, pid {process.pid}\)"
    return rf"gregale: error: {name} {why}\. It goes on from there\.\n"


@pytest.mark.parametrize(("processes", "lost"), [(3, 1), (2, 0)], ids=["killed", "first killed"])
def test_a_lost_process_is_named_by_all_others(processes, lost):
    with running(processes) as job:
        began = time.monotonic()
        job[lost].kill()
        for process in set(job) - {job[lost]}:
            code, _, err = finished(process)
            assert re.fullmatch(message(lost, job[lost], "was lost: its connection closed"), err), err
            assert code == EXIT_CODE == 75
        assert time.monotonic() - began < 60, "the machine may be busy, but not as JAX waits"


def test_an_error_of_one_process_ends_the_others():
    with running(2, errs_at=1) as job:
        code, _, err = finished(job[0])
        why = f"ended with an error {TIMEOUT_SECONDS} s ago; see its own output"
        assert re.fullmatch(message(1, job[1], why), err), err
        assert code == 1
        code, _, err = finished(job[1])
        assert (code, err) == (2, "text that only this process sees\n"), "JAX does not wait for the others"
