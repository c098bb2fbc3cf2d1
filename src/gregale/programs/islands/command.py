"""`gregale islands`: a lighthouse and several islands on this machine, in one view, with a picture of their rounds."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.islands.engine.namespaces import Network, rate_limited
from gregale.islands.engine.server import PeerUnreachable, Refused, ask_status
from gregale.programs.island.timing import timing_of
from gregale.programs.islands.processes import Lighthouse, Member, end, make_token, start, start_lighthouse
from gregale.programs.islands.rounds import draw_rounds, rounds_of
from gregale.programs.islands.view import FleetView, Status, changes
from gregale.services.command import Command
from gregale.services.config import TrainConfig
from gregale.services.parsing import dump
from gregale.services.signing import read_token
from gregale.settings import Settings, whole
from gregale.storage import Place, is_url, place, write_bytes
from gregale.timeline.plot import check_picture_path

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class IslandsOptions(Settings):
    """Options of the command, beside the configuration."""

    count: int = field(default=2, metadata={"help": "number of islands", "range": whole(1, 64)})
    bandwidth: str | None = field(
        default=None,
        metadata={"help": "give each island a link of so much, for example 200mbit (network namespaces, as root)"},
    )
    fresh: bool = field(default=False, metadata={"help": "do not resume: set existing runs aside and start anew"})
    picture: Path | None = field(
        default=None, metadata={"help": "where the rounds are drawn at the end; null: <runs>/<name>.islands/rounds.svg"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.picture is not None:
            check_picture_path(self.picture, "picture")


def main(options: IslandsOptions, config: TrainConfig) -> int:
    """Runs a fleet until all its islands are complete, or until a signal; 0 if all are."""
    config.sync.check_joins_islands()
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        network = stack.enter_context(rate_limited(options.count, options.bandwidth)) if options.bandwidth else None
        view = stack.enter_context(FleetView())
        fleet = Fleet(options, config, folder, network, view)
        stack.callback(fleet.end)
        return fleet.run()


def folder_of(config: TrainConfig) -> Path:
    """Where a fleet's secret lies, and what its islands say: always on this machine."""
    runs = Path("runs") if is_url(config.runs) else Path(expand(config.runs, "runs"))
    return runs / f"{config.name}.islands"


class Fleet:
    """The lighthouse and the islands of one command."""

    def __init__(
        self, options: IslandsOptions, config: TrainConfig, folder: Path, network: Network | None, view: FleetView
    ):
        self._options, self._folder, self._network, self._view = options, folder, network, view
        self._islands = config.islands
        self._token = folder / "token"
        make_token(self._token)
        self._stopped: str | None = None
        self._config = self._written(config)
        self._members: list[Member] = []
        self._lighthouse: Lighthouse | None = None
        self._name = config.name
        self._runs: Place = place(expand(config.runs, "runs"))

    def run(self) -> int:
        """Starts all, shows them until they end, draws their rounds."""
        old = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self._start()
            statuses = self._watch()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return self._tell(statuses)

    def end(self) -> None:
        """Ends what still runs, the islands first."""
        end([member.process for member in self._members])
        if self._lighthouse is not None:
            end([self._lighthouse.process])

    def _stop(self, number: int, _) -> None:
        """The first signal ends the fleet after its checkpoints; a second one of Ctrl-C does not wait."""
        if self._stopped is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stopped = signal.Signals(number).name

    def _written(self, config: TrainConfig) -> Path:
        """The configuration of all islands as a file."""
        path = self._folder / "config.yaml"
        number = max(config.islands.start, self._options.count)  # all of them are started at once
        islands = replace(config.islands, name=None, start=number, token_file=str(self._token))
        write_bytes(path, dump(replace(config, islands=islands)).encode())
        return path

    def _start(self) -> None:
        bind = self._network.coordinator if self._network else "127.0.0.1"
        output = self._folder / "lighthouse.log"
        self._lighthouse = start_lighthouse(f"{bind}:0", self._token, timing_of(self._islands), output)
        names = [
            f"{self._name}-{chr(ord('a') + number % 26)}{number // 26 or ''}" for number in range(self._options.count)
        ]
        for number, name in enumerate(names):
            self._members.append(self._started(number, name))
        self._view.message(
            f"{self._name}: {len(names)} islands ({', '.join(names)}), lighthouse at {self._lighthouse.address}"
            + (f", links of {self._options.bandwidth}" if self._options.bandwidth else "")
            + f". What each says is in {self._folder}/<island>.log."
        )

    def _started(self, number: int, name: str) -> Member:
        assert self._lighthouse is not None
        site = self._network.sites[number] if self._network else None
        run = self._runs / name
        (run / "island.address").unlink(missing_ok=True)
        command = [
            *("island", str(self._config), "--name", name, "--islands.name", name),
            *(
                "--islands.lighthouse",
                self._lighthouse.address,
                "--islands.bind",
                site.address if site else "127.0.0.1",
            ),
            *(["--fresh"] if self._options.fresh else []),
        ]
        output = self._folder / f"{name}.log"
        output.unlink(missing_ok=True)
        return Member(name, run, output, start(command, output, site.command if site else ()))

    def _watch(self) -> dict[str, Status]:
        """Shows the fleet until all islands have ended."""
        token = read_token(self._token, "islands.token_file")
        statuses: dict[str, Status] = {member.name: {} for member in self._members}
        told: set[str] = set()
        asked = False
        while any(member.process.poll() is None for member in self._members):
            if self._stopped and not asked:
                asked = True
                self._view.message(f"{self._stopped}: the islands finish their round, save, and end.")
                _signal_all(self._members, signal.SIGTERM)
            now = {member.name: newest(member, token, statuses[member.name]) for member in self._members}
            for text in changes(statuses, now):
                self._view.message(text)
            statuses = now
            self._tell_ended(told)
            self._view.show(statuses)
            time.sleep(POLL_SECONDS)
        self._tell_ended(told)
        return statuses

    def _tell_ended(self, told: set[str]) -> None:
        """Says, once, how an island has ended."""
        for member in self._members:
            code = member.process.poll()
            if code is None or member.name in told:
                continue
            told.add(member.name)
            if code < 0:
                self._view.message(f"{member.name} died of {signal.Signals(-code).name}; the others go on.")
            elif code and not self._stopped:
                self._view.message(f"{member.name} ended with exit code {code}: {member.last_lines()}")
            else:
                self._view.message(f"{member.name}: {member.last_lines(1)}")

    def _tell(self, statuses: dict[str, Status]) -> int:
        codes = [member.process.returncode for member in self._members]
        picture = self._options.picture or self._folder / "rounds.svg"
        try:
            rounds = {member.name: rounds_of(member.run) for member in self._members}
            if any(rounds.values()):
                draw_rounds(picture, rounds)
                self._view.message(f"The rounds are drawn in {picture}.")
        except UserError as error:
            self._view.message(f"The rounds could not be drawn: {error}")
        if self._stopped:
            self._view.message(f"Stopped by {self._stopped}; the same command goes on.")
            return 128 + signal.Signals[self._stopped]
        return max((abs(code) for code in codes), default=0) and 1


def newest(member: Member, token: bytes, before: Status) -> Status:
    """What an island says of itself, or said last; of one that has died since it says so."""
    status = status_of(member, token) or before
    return {**status, "state": "dead"} if (member.process.poll() or 0) < 0 else status


def status_of(member: Member, token: bytes) -> Status:
    """What an island says of itself; empty if it does not answer."""
    if (address := member.address) is None or member.process.poll() is not None:
        return {}
    try:
        return ask_status(address, token, timeout_seconds=1.0)
    except (PeerUnreachable, Refused):
        return {}


def _signal_all(members: list[Member], number: int) -> None:
    for member in members:
        if member.process.poll() is None:
            member.process.send_signal(number)


COMMAND = Command(main=main, options=IslandsOptions, config=TrainConfig, positional=("config",))
