"""Compiling for TPUs as far as the memory report: what a program takes, and its schedule, before its code is made.

    outcome = reported(request, "step", arguments)

The TPU compiler has no option that ends it there. But with `xla_dump_to` it writes, in this order, the schedule, the
memory report and the schedule once more, and then makes code, which takes ten times as long. So a process of its own
compiles (`gregale.programs.plan.compile_worker`). It is killed when the third file is there, for then the other two
are whole. It ends with this process too, however that ends.
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
    """What the other process makes its programs of.

    - `config`: of the run
    - `tokens`: the tokenizer's vocabulary size
    - `topology`, `slices`: as of `gregale.programs.plan.devices.topology_target`
    """

    config: TrainConfig
    tokens: int
    topology: str
    slices: int


def reported(request: Request, program: str, arguments: int) -> Outcome:
    """What the compiler says of one of a run's programs, by the program's name, before it makes code.

    - `arguments`: bytes on a device of what the program is given

    Raises:
        UserError: the compiler refuses the program for another reason than the devices' memory, or its process fails.
    """
    with TemporaryDirectory(prefix="gregale-plan-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(dump(request.config), encoding="utf-8")
        asked = {"program": program, **{key: getattr(request, key) for key in ("tokens", "topology", "slices")}}
        (folder / REQUEST).write_text(json.dumps(asked), encoding="utf-8")
        with _child(folder) as process:
            while (status := process.poll()) is None and not any((folder / DUMP).glob(f"*{AFTERWARDS}")):
                time.sleep(POLL_SECONDS)
        if status:
            raise crashed(status, (folder / LOG).read_text(encoding="utf-8", errors="replace"), program)
        refused = folder / REFUSED
        message = refused.read_text(encoding="utf-8") if refused.exists() else None
        return read_dump(folder / DUMP, arguments, message, program)


@contextmanager
def _child(folder: Path) -> Iterator[subprocess.Popen]:
    """The process that compiles; signals from the terminal do not reach it, and it is gone at the end."""
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
