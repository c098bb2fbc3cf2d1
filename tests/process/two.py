"""Two real processes, joined over gloo."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.forked import Popen
from tests.ports import free_port
from tests.programs.tiny import FAST_TO_COMPILE, finished, start

JOIN = """
import sys
import jax

rank = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, rank)
"""


def run_two(program: str, *arguments: str, devices: int = 2) -> list[str]:
    """Return what each process of a program printed; `rank` and `jax` are there, joined.

    The arguments follow in `sys.argv[3:]`.
    """
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command, port = [sys.executable, "-c", JOIN + program], str(free_port())
    found = all_finished(
        [Popen([*command, str(rank), port, *arguments], env=environment, **streams) for rank in range(2)]
    )
    assert [code for code, _, _ in found] == [0, 0], "\n".join(out for _, out, _ in found)
    return [out for _, out, _ in found]


def gregale_in_two(
    folder: Path,
    *words: str,
    different: tuple[str, ...] = (),
    flags: str = FAST_TO_COMPILE,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of `gregale WORDS` in both; the second has different options too.

    - `variables`: of the second's environment
    """
    join = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", "2"]
    first = start(folder, *words, *join, "--distributed.process", "0", flags=flags)
    options = ["--distributed.process", "1", *different]
    return all_finished([first, start(folder, *words, *join, *options, flags=flags, variables=variables)])


def all_finished(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process, when it has ended."""
    try:
        return [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
