"""Provides `gregale watch`, which follows a run, or the islands of a fleet, until completion or Ctrl-C."""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TextIO, cast

from rich.live import Live

from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.programs.watch.run_poller import RunPoller, RunStatus, state_sentence
from gregale.programs.watch.view import fleet_view, plain_line, view_of
from gregale.runs.run_paths import RunPaths, find_run
from gregale.runs.run_summary import State
from gregale.settings import Settings, between, setting, whole
from gregale.storage import ObjectPath, StoreError
from gregale.streams import ResilientStream, printable
from gregale.terminal import Console

if TYPE_CHECKING:
    from gregale.programs.watch.web import Server

SECONDS, STORE_SECONDS = 1.0, 10.0
PLAIN_SECONDS = 5.0
FLEET, COORDINATOR = ".islands", "lighthouse"


@dataclass(frozen=True)
class WatchOptions(Settings):
    run: str = field(metadata={"help": "the run: its directory or URL, or its name under runs/; or a fleet's name"})
    seconds: float | None = setting(
        None, "the time between two polls; null: 1, and 10 for a run in an object store", range=between(0.1, 3600)
    )
    once: bool = setting(False, "show the current state, and exit")
    web: bool = setting(False, "also serve a page to a browser on this machine, until Ctrl-C")
    port: int = setting(0, "the port of the page; 0: any free port", range=whole(0, 65_535))
    address: str = setting("127.0.0.1", "the page's address; other than loopback, it adds a secret path")

    def __post_init__(self):
        super().__post_init__()
        if self.once and self.web:
            raise UserError("once and web are both given: a page is served until Ctrl-C; leave one out.")


def main(options: WatchOptions) -> int:
    """Show the run until it is complete; return 0 then and after Ctrl-C, 128 + the number of another signal."""
    runs = runs_of(options.run)
    pollers = {run.path: RunPoller(run) for run in runs}
    seconds = options.seconds or (STORE_SECONDS if isinstance(runs[0].path, ObjectPath) else SECONDS)
    with ExitStack() as stack:
        stop, screen = Stop(), stack.enter_context(Screen())
        stack.enter_context(handled_signals(stop.take))
        if options.web:
            screen.message(f"The page is at {stack.enter_context(served(runs, options)).address}")
        while True:
            for run in islands_of(options.run):  # an island may begin after the others
                pollers.setdefault(run.path, RunPoller(run))
            if snapshots := poll_all(pollers.values(), screen):
                complete = all(each.summary.state is State.COMPLETE for each in snapshots)
                ends = options.once or (complete and not options.web)
                screen.show(snapshots, is_last=ends)
                if ends:
                    return 0
            if stop.wait(seconds):
                return stop.code


def served(runs: Sequence[RunPaths], options: WatchOptions) -> "Server":
    """Return a server of the page of runs. Raises `UserError` if the page cannot be made or served."""
    from gregale.programs.watch.web import LivePage, Server  # a late import, because the terminal does not need it

    page = LivePage(runs)
    page.now()
    return Server(page.now, options.address, options.port)


def runs_of(name: str) -> list[RunPaths]:
    """Return the run with a name, or the runs of a fleet's islands that have begun."""
    if found := islands_of(name):
        return found
    try:
        return [find_run(name)]
    except UserError:
        if not (logs := logs_of(name)):
            raise
        raise UserError(
            f"{name} is a fleet without a run: its islands still prepare their data, or have ended before that. "
            f"Their logs are in {logs[0].parent}."
        ) from None


def islands_of(name: str) -> list[RunPaths]:
    """Return the runs of a fleet's islands that have begun; none if this is no fleet."""
    islands = [log.parent.parent / log.stem for log in logs_of(name)]
    return [RunPaths(island) for island in islands if island.is_dir()]


def logs_of(name: str) -> list[Path]:
    """Return the log of each island of a fleet, sorted by name; none if this is no fleet."""
    for folder in (Path(f"{name}{FLEET}"), Path("runs") / f"{name}{FLEET}", Path(name), Path("runs") / name):
        if folder.name.endswith(FLEET):
            logs = [log for log in sorted(folder.glob("*.log")) if log.stem != COORDINATOR]
            if logs:
                return logs
    return []


def poll_all(pollers: Iterable[RunPoller], screen: "Screen") -> list[RunStatus]:
    """Return the current state of the runs and print their events; return none if their store does not answer."""
    try:
        found = [poller.poll() for poller in pollers]
    except StoreError as error:
        screen.message(str(error))
        return []
    for event in (event for _, events in found for event in events):
        screen.message(event)
    return [snapshot for snapshot, _ in found]


class Screen:
    """Output that redraws a view on a terminal; other streams get a plain line after each change, rate-limited."""

    def __init__(self, file: TextIO | None = None):
        stream = ResilientStream(file or sys.stdout)
        self._console = Console(file=cast(TextIO, stream))
        self._live: Live | None = None
        if stream.isatty() and self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        self._printed: dict[str, tuple[str, float]] = {}

    def show(self, snapshots: Sequence[RunStatus], is_last: bool = False) -> None:
        """Show one run, or several side by side; `is_last`: the final view."""
        if self._live is not None:
            several = len(snapshots) > 1
            view = fleet_view(snapshots, self._console) if several else view_of(snapshots[0], self._console)
            self._live.update(view, refresh=True)
            return
        for each in snapshots:
            name, line, now = each.summary.path, plain_line(each), time.monotonic()
            printed, when = self._printed.get(name, ("", -PLAIN_SECONDS))
            if line != printed and (is_last or now - when >= PLAIN_SECONDS):
                self._printed[name] = line, now
                self.message(line)
                if not printed and each.summary.state in (State.STOPPED, State.DAMAGED):
                    self.message(state_sentence(each.summary))

    def message(self, text: str) -> None:
        """Print a line, above the view if there is one."""
        self._console.print(printable(text), soft_wrap=self._live is None)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class Stop:
    """Stop request by a signal; `code` is the exit code of the command."""

    def __init__(self) -> None:
        self._event, self.code = Event(), 0

    def take(self, number: int, _: object) -> None:
        """Handle a signal; Ctrl-C is the normal end of the command, not a failure."""
        self.code = 0 if number == signal.SIGINT else 128 + number
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


@contextmanager
def handled_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` for the signals that end a command, so that it ends between polls and restores the terminal."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


COMMAND = Command(main=main, options=WatchOptions, positional=("run",))
