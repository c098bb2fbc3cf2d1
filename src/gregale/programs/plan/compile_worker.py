"""Provides the process that compiles a program for `gregale.programs.plan.step`, which kills it.

    python -m gregale.programs.plan.compile_worker FOLDER PARENT

FOLDER has the configuration and the request. The process writes the compiler's files there, and the compiler's error if
the program does not fit. PARENT is the waiting process; if it ends, this process ends.
"""

import json
import signal
import sys
from pathlib import Path

import haliax as hax
import jax

from gregale.atomic_files import write_bytes
from gregale.distributed.devices import end_with_parent
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.step import CONFIG, DUMP, DUMPED, REFUSED, REQUEST, lowerings, setup_for
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load


def main(folder: Path) -> None:
    """Compile the program that the request names."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    target = topology_target(request["topology"], request["slices"], None)
    setup = setup_for(load(TrainConfig, folder / CONFIG), request["tokens"], target)
    trace = next(each.trace for each in lowerings(setup) if each.name == request["program"])
    with hax.axis_mapping({}):
        lowered = trace().lower()
    try:
        lowered.compile(compiler_options={"xla_dump_to": str(folder / DUMP), **DUMPED})
    except jax.errors.JaxRuntimeError as error:
        write_bytes(folder / REFUSED, str(error).encode())


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, int(sys.argv[2]))
    main(Path(sys.argv[1]))
