"""Programs that run in two real processes, joined over gloo."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.forked import Popen
from tests.ports import free_port

JOIN = """
import sys
import jax

rank = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, rank)
"""


def run(program: str, *arguments: str, devices: int = 2) -> list[str]:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    port = str(free_port())
    processes = [
        Popen(
            [sys.executable, "-c", JOIN + program, str(rank), port, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.fixture(scope="session")
def run_two_processes() -> Callable[..., list[str]]:
    """`run(program, *arguments, devices=2)`: what each process printed; `rank` and `jax` are there, joined.

    The arguments follow in `sys.argv[3:]`.
    """
    return run
