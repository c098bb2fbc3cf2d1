"""A fleet of real islands on this machine, to be disturbed: started, killed, stopped, watched.

    with Fleet(folder, "tiny.yaml", Seconds(heartbeat=2.0), options) as fleet:
        fleet.start("a"); fleet.start("b")
        fleet.wait(lambda: fleet.newest() >= 5, 60, "five rounds")
        fleet.islands["a"].kill()
        fleet.check()              # AssertionError where two islands have committed different states of a round

What islands have committed is read from their rounds.jsonl, and remembered: one that starts again forgets rounds after
its checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gregale.islands.local_fleet import end, make_token
from gregale.runs.history import RunPaths
from gregale.storage import ObjectPath, StoragePath, storage_path
from gregale.storage.jsonl import Entry, read_entries
from tests.forked import Popen
from tests.namespaces import Network, Site
from tests.ports import free_port

POLL_SECONDS = 0.05
STORE_SECONDS = 1.0
GREGALE = (sys.executable, "-m", "gregale")
DOOMED = (sys.executable, str(Path(__file__).with_name("doomed.py")))


class Late(AssertionError):
    """What was waited for has not come."""


class Seconds(NamedTuple):
    """As the configuration's `islands`."""

    heartbeat: float = 2.0
    reduce: float = 5.0


class Seen(NamedTuple):
    """A committed round as an island has written it down."""

    island: str
    round: int
    generation: int
    digest: str
    members: tuple[str, ...]
    healed: bool
    ended: float
    weight: float


@dataclass
class Island:
    """An island, whichever process it is in at the moment."""

    name: str
    run: StoragePath
    output: Path
    process: subprocess.Popen

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    @property
    def doom(self) -> Path:
        """See `doomed.py`."""
        return self.output.with_suffix(".doom")

    @property
    def address(self) -> str:
        return RunPaths(self.run).address.read_bytes().decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self, seconds: float = 120) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def step(self) -> int:
        """The newest step in metrics.jsonl; 0 before the first."""
        return max((each["step"] for each in metrics(self.run)), default=0)


class Fleet:
    """A lighthouse and islands, in processes of their own; ends them all at the end.

    - `folder`: what is relative in the configuration is so to it; logs and runs are there
    - `config`: its path
    - `options`: of all islands
    - `doomed`: islands can be told when to die (`Island.doom`) and how long a step takes
    - `network`: islands are put into its sites, in the order of their first start; None: all share the loopback
    - `coordinators`: how many there are; each has a copy of the token, and so a disk, of its own
    - `stores`: by the names of islands, the URLs below which they have their runs; others: `runs` in the folder
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        seconds: Seconds,
        options: Sequence[str] = (),
        doomed: bool = False,
        network: Network | None = None,
        pace: float = 0.0,
        environment: Mapping[str, str] | None = None,
        stores: Mapping[str, str] | None = None,
        coordinators: int = 1,
    ):
        self.folder, self.seconds = folder, seconds
        self.islands: dict[str, Island] = {}
        self._config, self._options, self._doomed = config, tuple(options), doomed
        self._history: dict[tuple[str, int, str], Seen] = {}
        self.token = folder / "token"
        make_token(self.token)
        self.network, self._pace, self._environment = network, pace, dict(environment or {})
        self.sites: dict[str, Site] = {}
        self._stores, self._read = dict(stores or {}), defaultdict[str, float](float)
        bind = network.coordinator if network else "127.0.0.1"
        self.addresses = [f"{bind}:{free_port(bind)}" for _ in range(coordinators)]
        self._others = [self._coordinator(index) for index in range(1, coordinators)]
        self.lighthouse = self.start_lighthouse()

    def start_lighthouse(self) -> subprocess.Popen:
        """Starts the first coordinator, at the address that it had."""
        self.lighthouse = self._coordinator(0)
        return self.lighthouse

    def token_of(self, index: int) -> Path:
        """The token file of a coordinator."""
        return self.token.with_name(f"{self.token.name}{index or ''}")

    def _coordinator(self, index: int) -> subprocess.Popen:
        path = self.token_of(index)
        if index:
            shutil.copy(self.token, path)
        command = [*GREGALE, "lighthouse", "--bind", self.addresses[index], "--token_file", str(path)]
        return self._process(command, self.folder / "lighthouse.log", {})

    def start(self, name: str, *options: str, pace: float | None = None, log: str = "") -> Island:
        """Starts an island, or one that has ended again; `pace`: see `doomed.py`; `log`: of one of its processes."""
        if self.network and name not in self.sites:
            self.sites[name] = self.network.sites[len(self.sites)]
        site = self.sites.get(name, Site((), "127.0.0.1"))
        command = [*site.command, *(DOOMED if self._doomed else GREGALE), "island", self._config, "--name", name]
        given = {
            "name": name,
            "lighthouse": ",".join(self.addresses),
            "token_file": str(self.token),
            "bind": site.address,
            "heartbeat_seconds": str(self.seconds.heartbeat),
            "reduce_seconds": str(self.seconds.reduce),
        }
        for key, value in given.items():
            command += [f"--islands.{key}", value]
        if url := self._stores.get(name):
            command += ["--runs", url]
        log = log or name
        output, runs = self.folder / f"{log}.log", storage_path(url) if url else self.folder / "runs"
        doom = output.with_suffix(".doom")
        doom.unlink(missing_ok=True)
        more = {"DOOM": str(doom), "PACE": str(pace or self._pace)}
        process = self._process([*command, *self._options, *options], output, more)
        self.islands[log] = Island(name, runs / name, output, process)
        return self.islands[log]

    def _process(self, command: Sequence[str], output: Path, more: dict[str, str]) -> subprocess.Popen:
        with output.open("ab") as file:
            return Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu", **self._environment, **more},
            )

    @property
    def living(self) -> list[Island]:
        return [island for island in self.islands.values() if island.lives]

    def observe(self) -> list[Seen]:
        """All rounds that were ever committed, in the order of their numbers."""
        for island in self.islands.values():
            for each in self._rounds_of(island):
                fields = {name: each[name] for name in Seen._fields[1:]}
                seen = Seen(island.name, **fields | {"members": tuple(each["members"])})
                self._history.setdefault((seen.island, seen.round, seen.digest), seen)
        return sorted(self._history.values(), key=lambda seen: seen.round)

    def _rounds_of(self, island: Island) -> Sequence[Entry]:
        """Its rounds; none if they are in a store that was asked less than a second ago."""
        if isinstance(island.run, ObjectPath):
            if time.monotonic() - self._read[island.name] < STORE_SECONDS:
                return []
            self._read[island.name] = time.monotonic()
        return read_entries(RunPaths(island.run).rounds, number="round").entries

    def newest(self, *names: str) -> int:
        """The newest round that one of these islands has committed, or any; -1: none."""
        return max((each.round for each in self.observe() if not names or each.island in names), default=-1)

    def wait(self, reached: Callable[[], Any], seconds: float, what: str) -> float:
        """Waits until something holds; returns how long it took. Raises `Late`, with the ends of all logs."""
        began = time.monotonic()
        while not reached():
            if time.monotonic() - began > seconds:
                raise Late(f"{what}: not after {seconds:g} s\n{self.tails()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def wait_for_members(self, names: Sequence[str], seconds: float, after: int = -1) -> float:
        """Waits for a round after `after` that all of these reduce together, and nobody else."""
        wanted = set(names)

        def together() -> bool:
            rounds = [each for each in self.observe() if each.round > after and not each.healed]
            return any(set(each.members) == wanted for each in rounds)

        return self.wait(together, seconds, f"a round of {', '.join(names)}")

    def check(self) -> int:
        """Returns how many rounds two islands have both committed; AssertionError if they differ in one of them.

        A new generation may begin with the last one's round and other leases of the data: these are two.
        """
        digests: dict[tuple[int, int], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for each in self.observe():
            digests[each.generation, each.round][each.digest].add(each.island)
        different = {number: dict(found) for number, found in digests.items() if len(found) > 1}
        assert not different, f"islands have committed different states: {different}"
        return sum(len(next(iter(found.values()))) > 1 for found in digests.values())

    def tails(self) -> str:
        return "\n".join(
            f"-- {name}: " + "\n   ".join(one.said().splitlines()[-6:]) for name, one in self.islands.items()
        )

    def close(self) -> None:
        """Ends all processes, at once."""
        for island in self.islands.values():
            if island.lives:
                island.signal(signal.SIGCONT)
        coordinators = [self.lighthouse, *self._others]
        end([*(island.process for island in self.islands.values()), *coordinators], signal.SIGKILL)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics(run: StoragePath) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
