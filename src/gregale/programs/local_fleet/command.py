"""`gregale islands`: a lighthouse and several islands on this machine, in one view, with a report at the end."""

import shlex
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.programs.local_fleet.processes import Member, claimed, end, end_of, make_token, start, start_lighthouse
from gregale.programs.report.page import report_page
from gregale.programs.watch.command import SECONDS, STORE_SECONDS, Screen, handled_signals, poll_all
from gregale.programs.watch.run_poller import RunPoller
from gregale.runs.config import TrainConfig
from gregale.runs.history import read_history
from gregale.runs.parsing import dump
from gregale.runs.run_paths import RunPaths
from gregale.settings import Settings, setting, whole
from gregale.storage import ObjectPath, RetryPolicy, StoragePath, StoreError, is_url, storage_path, write_bytes
from gregale.web.files import write_page

POLL_SECONDS = 0.5
SHORT_RETRIES = RetryPolicy(seconds=1.0, silence_seconds=1.0)  # so that signals are handled soon


@dataclass(frozen=True)
class IslandsOptions(Settings):
    count: int = setting(2, "number of islands", range=whole(1, 64))
    fresh: bool = setting(False, "do not resume: set existing runs aside and start anew")


def main(options: IslandsOptions, config: TrainConfig) -> int:
    """Run a fleet until all its islands are complete, or until a signal; return 0 if all are complete."""
    config.sync.check_joins_islands()
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
    return runs / f"{config.name}.islands"


class Fleet:
    """The lighthouse and the islands of one command."""

    def __init__(self, options: IslandsOptions, config: TrainConfig, folder: Path, screen: Screen):
        self._options, self._folder, self._screen = options, folder, screen
        self._islands = config.islands
        self._token = folder / "token"
        make_token(self._token)
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
        """End the running processes, the islands first."""
        end([member.process for member in self._members])
        if self._lighthouse is not None:
            end([self._lighthouse])

    def _stop(self, number: int, _) -> None:
        """Note the first signal, which ends the fleet after its checkpoints; a second Ctrl-C ends at once."""
        if self._stopped is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stopped = signal.Signals(number).name

    def _write_config(self, config: TrainConfig) -> Path:
        """Write the configuration of all islands to a file; return its path."""
        path = self._folder / "config.yaml"
        number = max(config.islands.min_members_to_start, self._options.count)  # all of them are started at once
        islands = replace(config.islands, name=None, min_members_to_start=number, token_file=str(self._token))
        write_bytes(path, dump(replace(config, islands=islands)).encode())
        return path

    def _start(self) -> None:
        output = self._folder / "lighthouse.log"
        self._lighthouse, address = start_lighthouse(self._token, output)
        names = [
            f"{self._name}-{chr(ord('a') + number % 26)}{number // 26 or ''}" for number in range(self._options.count)
        ]
        for name in names:
            self._members.append(self._start_island(name, address))
        self._screen.message(
            f"{self._name}: {len(names)} islands ({', '.join(names)}), lighthouse at {address}. "
            f"The output of each is in {self._folder}/<island>.log."
        )

    def _start_island(self, name: str, address: str) -> Member:
        run = self._runs / name
        (run / "island.address").unlink(missing_ok=True)
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
        """Show the fleet until all islands have ended."""
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
