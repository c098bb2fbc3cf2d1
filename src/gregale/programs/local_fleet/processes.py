"""The processes of a fleet on this machine: a lighthouse and its islands, started, watched and ended together."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gregale.atomic_files import LockHeld, locked
from gregale.distributed.parent_death import end_with_parent
from gregale.errors import Busy, UserError
from gregale.storage import StoragePath

GREGALE = (sys.executable, "-m", "gregale")
_LISTENS = re.compile(rb"listens at (\S+)\. ")
_ERROR = "gregale: error: "
_START_SECONDS = 60.0
_KILL_AFTER_SECONDS = 60.0


@dataclass
class Member:
    """An island's process."""

    name: str  # of the island
    run: StoragePath  # its run directory
    output: Path  # the file with its standard output and error
    command: Sequence[str]  # arguments of `gregale`
    process: subprocess.Popen


def end_of(output: Path, count: int = 3) -> str:
    """Return the end of a process's output: its error without the prefix, otherwise its last `count` lines."""
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [index for index, line in enumerate(lines) if line.startswith(_ERROR)]
    found = lines[errors[-1] :] if errors else lines[-count:]
    return " ".join(found).removeprefix(_ERROR)


def start(command: Sequence[str], output: Path) -> subprocess.Popen:
    """Start a process with its output in a file; only the fleet's signals reach it, not the terminal's."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(
            [*GREGALE, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # SIGTERM: islands save and end, as with a signal by hand
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def start_lighthouse(token: Path, output: Path) -> tuple[subprocess.Popen, str]:
    """Start the coordinator; return its process and address once it listens. Raises `UserError` if it does not."""
    output.unlink(missing_ok=True)
    process = start(["lighthouse", "--bind", "127.0.0.1:0", "--token_file", str(token)], output)
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if found := _LISTENS.search(output.read_bytes()):
            return process, found[1].decode()
        if process.poll() is not None:
            break
        time.sleep(0.05)
    end([process])
    raise UserError(f"the lighthouse did not start: {end_of(output)}")


def make_token(path: Path) -> None:
    """Write a new secret, readable by its owner alone; keep an existing one."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a fleet's folder inside the block; raise `Busy` if another command runs this fleet.

    A second command would overwrite the logs and the configuration of the first.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock"))
        except LockHeld as held:
            raise Busy(
                f"{folder}: another `gregale islands` ({held}) runs this fleet; stop it, or take another name."
            ) from None
        yield


def end(processes: Sequence[subprocess.Popen], number: int = signal.SIGTERM) -> None:
    """Ask processes to end and wait; kill those that run for another minute."""
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
