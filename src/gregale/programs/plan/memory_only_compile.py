"""Provides compilation for TPUs up to the memory report, which has a program's memory and schedule.

The TPU compiler has no option to stop there. With `xla_dump_to` it writes, in this order, the schedule, the memory
report and the schedule again, and then generates code, which takes ten times as long. Therefore a separate process
compiles (`gregale.programs.plan.compile_worker`). This module kills it when the third file exists, because the other
two are then complete. The process also ends when this process ends.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gregale.errors import UserError
from gregale.programs.plan.compiling import AFTERWARDS, Outcome, read_dump
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import dump

CONFIG, REQUEST, DUMP, REFUSED, LOG = "config.yaml", "request.json", "dump", "refused", "log"
POLL_SECONDS = 0.05
SHOWN_LINES = 3
# Log lines without the cause: stack frames, addresses, and the TPU library's report about itself.
_NOISE = re.compile(r"^\s*@ |^https://symbolize|^\*\*\* |\] RAW: |^=== Source Location Trace|^learning/")
_FATAL = re.compile(r"F\d{4} ")  # the compiler's mark of a fatal error
_PREFIX = re.compile(r"[A-Z]\d{4} \S+ +\d+ ")


@dataclass(frozen=True)
class Request:
    """Input of the compiling process."""

    config: TrainConfig  # of the run
    tokens: int  # the tokenizer's vocabulary size
    topology: str  # as for `gregale.programs.plan.devices.topology_target`
    slices: int  # likewise


def reported(request: Request, program: str, arguments: int) -> Outcome:
    """Return the compiler's report about a run's program, by its name, without code generation.

    - `arguments`: bytes of the program's arguments on a device

    Raises:
        UserError: the compiler rejects the program for another reason than the devices' memory, or its process fails.
    """
    with tempfile.TemporaryDirectory(prefix="gregale-plan-") as name:
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


def crashed(status: int, log: str, program: str) -> UserError:
    """Return the error for a compiling process that crashed, and save its complete log to a file.

    - `status`: as in `subprocess`: the exit status, or minus the number of the signal
    """
    number, kept = tempfile.mkstemp(prefix="gregale-plan-", suffix=".log")
    with open(number, "w", encoding="utf-8") as file:
        file.write(log)
    shown_lines = " / ".join(last_lines(log)).rstrip(".") or "none"
    how = f"with exit status {status}" if status > 0 else f"by signal {-status}"
    if -status in set(signal.Signals):
        how = f"by {signal.Signals(-status).name} (signal {-status})"
    advice = (
        "This is a fault of the compiler or of Gregale, not of the devices' memory. Other "
        "compute.compiler_options, or another compute.remat or compute.attention, may avoid it."
    )
    if -status == signal.SIGKILL:
        advice = (
            "A system that runs out of memory sends SIGKILL: more memory, or one compilation at a time, would work."
        )
    return UserError(
        f"the process that compiles the program {program!r} ended {how} before the compiler's memory report. "
        f"Its last lines: {shown_lines}. The whole log is in {kept}. {advice}"
    )


def last_lines(log: str) -> list[str]:
    """Return the compiler's fatal errors, or the last lines of a log that may have the cause."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    return [*dict.fromkeys(_PREFIX.sub("", line) for line in fatal or lines)][-SHOWN_LINES:]
