"""The processes of a fleet on this machine: a lighthouse and its islands, started, watched and ended together."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gregale.distributed.parent_death import end_with_parent
from gregale.errors import UserError
from gregale.islands.protocol.settings import Timing
from gregale.storage import StoragePath

GREGALE = (sys.executable, "-m", "gregale")
_LISTENS = re.compile(rb"listens at (\S+)\. ")
_ERROR = "gregale: error: "
_START_SECONDS = 60.0
_KILL_AFTER_SECONDS = 60.0


@dataclass
class Member:
    """An island's process.

    - `name`: the island's
    - `run`: its run directory
    - `output`: the file that has what it prints
    """

    name: str
    run: StoragePath
    output: Path
    process: subprocess.Popen

    def last_lines(self, count: int = 3) -> str:
        """The end of what it has printed; see `end_of`."""
        return end_of(self.output, count)


def end_of(output: Path, count: int = 3) -> str:
    """The end of what a process has printed: its error, which the caller calls one, else its last `count` lines."""
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [place for place, line in enumerate(lines) if line.startswith(_ERROR)]
    found = lines[errors[-1] :] if errors else lines[-count:]
    return " ".join(found).removeprefix(_ERROR)


@dataclass
class LighthouseHandle:
    """The coordinator's process, and the address at which it listens."""

    address: str
    process: subprocess.Popen


def start(command: Sequence[str], output: Path) -> subprocess.Popen:
    """Starts a process whose output goes to a file; signals from the terminal do not reach it, the fleet's own do."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(
            [*GREGALE, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # with SIGTERM, at which islands save and end, as they do by hand
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def start_lighthouse(token: Path, timing: Timing, output: Path) -> LighthouseHandle:
    """Starts the coordinator and waits until it listens; raises `UserError` if it does not."""
    output.unlink(missing_ok=True)
    seconds = ["--heartbeat_seconds", str(timing.heartbeat_seconds), "--join_seconds", str(timing.join_seconds)]
    command = ["lighthouse", "--bind", "127.0.0.1:0", "--token_file", str(token), *seconds]
    process = start(command, output)
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if found := _LISTENS.search(output.read_bytes()):
            return LighthouseHandle(found[1].decode(), process)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    end([process])
    raise UserError(f"the lighthouse did not start: {end_of(output)}")


def make_token(path: Path) -> None:
    """Writes a new secret, readable by its owner alone; one that is there stays."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")


def end(processes: Sequence[subprocess.Popen], number: int = signal.SIGTERM) -> None:
    """Asks processes to end and waits; who does not end within a minute is killed."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
    until = time.monotonic() + _KILL_AFTER_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
