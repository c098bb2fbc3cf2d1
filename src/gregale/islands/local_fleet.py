"""`gregale islands`: a lighthouse and several islands on this machine, in one view, with a report at the end."""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gregale.atomic_files import LockHeld, locked
from gregale.data.sources.base import expand
from gregale.distributed.devices import end_with_parent
from gregale.errors import Busy, UserError
from gregale.islands.config import settings_of
from gregale.islands.method import rounds_of
from gregale.islands.transport.lighthouse import records_beside
from gregale.programs.command import Command
from gregale.programs.report import report_page, write_page
from gregale.programs.watch import SECONDS, STORE_SECONDS, RunPoller, Screen, handled_signals, poll_all
from gregale.runs.config import TrainConfig
from gregale.runs.history import COORDINATOR, FLEET, RunPaths, read_history
from gregale.runs.parsing import dump
from gregale.settings import Settings, setting, whole
from gregale.storage import ObjectPath, RetryPolicy, StoragePath, StoreError, is_url, storage_path, write_bytes

POLL_SECONDS = 0.5
SHORT_RETRIES = RetryPolicy(seconds=1.0, silence_seconds=1.0)  # so that signals are handled soon


GREGALE = (sys.executable, "-m", "gregale")
_LISTENS = re.compile(rb"listens at (\S+)\. ")
_ERROR = "gregale: error: "
_START_SECONDS = 60.0
_KILL_AFTER_SECONDS = 60.0


@dataclass
class Member:
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
    try:
        with locked(folder / "lock"):
            yield
    except LockHeld as held:
        raise Busy(
            f"{folder}: another `gregale islands` ({held}) runs this fleet; stop it, or take another name."
        ) from None


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


@dataclass(frozen=True)
class IslandsOptions(Settings):
    count: int = setting(2, "number of islands", range=whole(1, 64))
    fresh: bool = setting(False, "do not resume: set existing runs aside and start anew")


def main(options: IslandsOptions, config: TrainConfig) -> int:
    """Run a fleet until all its islands are complete, or until a signal; return 0 if all are complete."""
    rounds_of(config.sync)
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(claimed(folder))
        screen = stack.enter_context(Screen())
        fleet = Fleet(options, config, folder, screen)
        stack.callback(fleet.end)
        return fleet.run()


def folder_of(config: TrainConfig) -> Path:
    """Return the local folder of a fleet's secret and its islands' logs."""
    runs = Path("runs") if is_url(config.runs) else Path(expand(config.runs, "runs"))
    return runs / f"{config.name}{FLEET}"


class Fleet:
    def __init__(self, options: IslandsOptions, config: TrainConfig, folder: Path, screen: Screen):
        self._options, self._folder, self._screen = options, folder, screen
        self._token = folder / "token"
        make_token(self._token)
        if options.fresh:
            records_beside(self._token).unlink(missing_ok=True)
        self._stopped: str | None = None
        self._config = self._write_config(config)
        self._members: list[Member] = []
        self._lighthouse: subprocess.Popen | None = None
        self._name = config.name
        self._runs: StoragePath = storage_path(expand(config.runs, "runs"))
        self._followers: dict[str, RunPoller] = {}  # pollers of the started runs, by the island's name

    def run(self) -> int:
        """Start all processes, show them until they end, and write a report."""
        with handled_signals(self._stop):
            self._start()
            self._watch()
        return self._finish()

    def end(self) -> None:
        end([member.process for member in self._members])
        if self._lighthouse is not None:
            end([self._lighthouse])

    def _stop(self, number: int, _) -> None:
        """Note the first signal, which ends the fleet after its checkpoints; a second Ctrl-C ends at once."""
        if self._stopped is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stopped = signal.Signals(number).name

    def _write_config(self, config: TrainConfig) -> Path:
        path = self._folder / "config.yaml"
        number = max(settings_of(config).min_members_to_start, self._options.count)  # all of them are started at once
        islands = replace(settings_of(config), name=None, min_members_to_start=number, token_file=str(self._token))
        write_bytes(path, dump(replace(config, islands=islands)).encode())
        return path

    def _start(self) -> None:
        self._lighthouse, address = start_lighthouse(self._token, self._folder / f"{COORDINATOR}.log")
        numbers = range(self._options.count)
        names = [f"{self._name}-{chr(ord('a') + number % 26)}{number // 26 or ''}" for number in numbers]
        for name in names:
            self._members.append(self._start_island(name, address))
        self._screen.message(
            f"{self._name}: {len(names)} islands ({', '.join(names)}), lighthouse at {address}. "
            f"The output of each is in {self._folder}/<island>.log."
        )

    def _start_island(self, name: str, address: str) -> Member:
        run = self._runs / name
        RunPaths(run).address.unlink(missing_ok=True)
        command = [
            *("island", str(self._config), "--name", name, "--islands.name", name),
            *("--islands.lighthouse", address),
            *("--islands.bind", "127.0.0.1"),
            *(["--fresh"] if self._options.fresh else []),
        ]
        output = self._folder / f"{name}.log"
        output.unlink(missing_ok=True)
        return Member(name, run, output, command, start(command, output))

    def _watch(self) -> None:
        seconds = STORE_SECONDS if isinstance(self._runs, ObjectPath) else SECONDS
        reported: set[str] = set()
        asked, shown = False, time.monotonic()
        while any(member.process.poll() is None for member in self._members):
            if self._stopped and not asked:
                asked = True
                self._screen.message(f"{self._stopped}: the islands finish their round, save, and end.")
                for member in self._members:
                    if member.process.poll() is None:
                        member.process.terminate()
            self._report_ended(reported)
            if time.monotonic() - shown >= seconds:
                shown = time.monotonic()
                self._show()
            time.sleep(POLL_SECONDS)
        self._show(is_last=True)
        self._report_ended(reported)

    def _show(self, is_last: bool = False) -> None:
        for member in self._members:
            path = replace(member.run, retry_policy=SHORT_RETRIES) if isinstance(member.run, ObjectPath) else member.run
            run = RunPaths(path)
            with suppress(StoreError):  # the store is unavailable for now
                if member.name not in self._followers and run.metrics.is_file():
                    self._followers[member.name] = RunPoller(run)
        if snapshots := poll_all(self._followers.values(), self._screen):
            self._screen.show(snapshots, is_last)

    def _report_ended(self, reported: set[str]) -> None:
        for member in self._members:
            code = member.process.poll()
            if code is None or member.name in reported:
                continue
            reported.add(member.name)
            if code < 0:
                again = shlex.join(word for word in member.command if word != "--fresh")
                self._screen.message(
                    f"{member.name} died of {signal.Signals(-code).name}; the others go on. "
                    f"`gregale {again}` starts it again."
                )
            elif code and not self._stopped:
                self._screen.message(f"{member.name} ended with exit code {code}: {end_of(member.output)}")
            else:
                self._screen.message(f"{member.name}: {end_of(member.output, 1)}")

    def _finish(self) -> int:
        codes = [member.process.returncode for member in self._members]
        try:
            if histories := [read_history(follower.run) for follower in self._followers.values()]:
                page = self._folder / "report.html"
                write_page(page, report_page(histories, [], []))
                self._screen.message(f"The report of the islands is in {page}.")
        except (OSError, UserError) as error:
            self._screen.message(f"The report of the islands could not be written: {error}")
        if self._stopped:
            self._screen.message(f"Stopped by {self._stopped}; the same command goes on.")
            return 128 + signal.Signals[self._stopped]
        return max((abs(code) for code in codes), default=0) and 1


COMMAND = Command(main=main, options=IslandsOptions, config=TrainConfig, positional=("config",))
