"""Provides compilation for TPUs up to the memory report, which has a program's memory and schedule.

    outcome = reported(request, "step", arguments)

The TPU compiler has no option to stop there. With `xla_dump_to` it writes, in this order, the schedule, the memory
report and the schedule again, and then generates code, which takes ten times as long. Therefore a separate process
compiles (`gregale.programs.plan.compile_worker`). This module kills it when the third file exists, because the other
two are then complete. The process also ends when this process ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gregale.programs.plan.compiling import AFTERWARDS, Outcome, read_dump
from gregale.programs.plan.crash import crashed
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import dump

CONFIG, REQUEST, DUMP, REFUSED, LOG = "config.yaml", "request.json", "dump", "refused", "log"
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Request:
    """Input of the compiling process.

    - `config`: configuration of the run
    - `tokens`: the tokenizer's vocabulary size
    - `topology`, `slices`: as for `gregale.programs.plan.devices.topology_target`
    """

    config: TrainConfig
    tokens: int
    topology: str
    slices: int


def reported(request: Request, program: str, arguments: int) -> Outcome:
    """Return the compiler's report about a run's program, by its name, without code generation.

    - `arguments`: bytes of the program's arguments on a device

    Raises:
        UserError: the compiler rejects the program for another reason than the devices' memory, or its process fails.
    """
    with TemporaryDirectory(prefix="gregale-plan-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(dump(request.config), encoding="utf-8")
        content = {"program": program, **{key: getattr(request, key) for key in ("tokens", "topology", "slices")}}
        (folder / REQUEST).write_text(json.dumps(content), encoding="utf-8")
        with _compiling_process(folder) as process:
            while (status := process.poll()) is None and not any((folder / DUMP).glob(f"*{AFTERWARDS}")):
                time.sleep(POLL_SECONDS)
        if status:
            raise crashed(status, (folder / LOG).read_text(encoding="utf-8", errors="replace"), program)
        refused = folder / REFUSED
        message = refused.read_text(encoding="utf-8") if refused.exists() else None
        return read_dump(folder / DUMP, arguments, message, program)


@contextmanager
def _compiling_process(folder: Path) -> Iterator[subprocess.Popen]:
    """Yield the compiling process and kill it at the end; it gets no signals from the terminal."""
    command = [sys.executable, "-m", "gregale.programs.plan.compile_worker", str(folder), str(os.getpid())]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
