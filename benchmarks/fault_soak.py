"""What `faults.py --soak` measures: a fleet that trains for minutes, with a fault every few seconds."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

from benchmarks.latency import delayed
from gregale.distributed.signing import read_token
from gregale.islands.transport.client import PeerUnreachable, RequestRejected, ask_status
from tests.fleet import Fleet, Island, Seconds, metrics
from tests.namespaces import Network, rate_limited

NAMES = ("a", "b", "c", "d")
ANSWERS_WITHIN = 5.0  # between two answers of one that lives
LAST = 50  # steps over which losses are averaged
LEAST_GOODPUT = 0.98
MOST_LOSS = 1.03  # of the undisturbed one
FRAGMENTS = 2
SOAK_FAULTS = ("step", "reduce", "held", "now", "two", "stop", "lighthouse", "link")
REPORTED_WITHIN = 3.0


@dataclass
class IslandTimes:
    """Seconds of training of all islands by their own status, and those in which they waited or healed.

    - `joining`: seconds from the start of restarted processes to their first step in the fleet
    """

    lived: float = 0.0
    waited: float = 0.0
    healed: float = 0.0
    joining: float = 0.0
    last: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # by process: when, and until then
    begun: dict[int, float] = field(default_factory=dict)  # by process: when it was heard first
    joined: int = 0  # processes

    def record(self, island: Island, token: bytes) -> None:
        """Ask an island for its status; the time between two answers counts, unless they are too far apart."""
        try:
            status = ask_status(island.address, token, 2.0)
        except (OSError, PeerUnreachable, RequestRejected):
            return
        now = time.monotonic()
        if status["state"] != "training":
            self.begun.setdefault(island.process.pid, now)
            return
        waited, healed = status["waiting_seconds"], status["healing_seconds"]
        if (begun := self.begun.pop(island.process.pid, None)) is not None:
            self.joining, self.joined = self.joining + now - begun, self.joined + 1
        if (before := self.last.get(island.process.pid)) is not None and now - before[0] < ANSWERS_WITHIN:
            self.lived += now - before[0]
            self.waited += waited - before[1]
            self.healed += healed - before[2]
        self.last[island.process.pid] = now, waited, healed

    @property
    def goodput(self) -> float:
        """The share of their time in which they neither waited nor healed."""
        return 1 - (self.waited + self.healed) / self.lived


@dataclass
class RoundGaps:
    """Times without a round of the fleet, and those that no island has reported.

    - `longest`: seconds
    - `unreported`: after three usual round times and `REPORTED_WITHIN` seconds, no living island's log had a line
    """

    longest: float = 0.0
    unreported: list[str] = field(default_factory=list)
    _newest: int = -1
    _since: float = field(default_factory=time.monotonic)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    _lines: int = 0
    _is_judged: bool = False

    def record(self, fleet: Fleet) -> None:
        """Compare the newest round and the logs with those of the last call."""
        now, newest = time.monotonic(), fleet.newest()
        lines = sum(island.said().count("No round for") for island in fleet.islands.values())
        if newest != self._newest:
            self._gaps.append(now - self._since)
            self._newest, self._since, self._lines, self._is_judged = newest, now, lines, False
            return
        self.longest = max(self.longest, now - self._since)
        limit = max(3 * median(self._gaps), 1.0) + REPORTED_WITHIN
        if len(self._gaps) > 3 and not self._is_judged and now - self._since > limit:
            self._is_judged = True
            if lines == self._lines:
                self.unreported.append(f"after round {newest}: {now - self._since:.1f} s, allowed {limit:.1f} s")


def tokens(fleet: Fleet) -> float:
    """Return the tokens of committed rounds."""
    return sum(each.weight for each in fleet.observe()) / FRAGMENTS


def loss(fleet: Fleet) -> float:
    """Return the mean of the islands' newest losses."""
    return mean(
        each["loss"]
        for island in fleet.islands.values()
        for each in [line for line in metrics(island.run) if "loss" in line][-LAST:]
    )


def undisturbed(folder: Path, wanted: float, start: Callable[[Path], Fleet], seconds: float) -> float:
    """Return the loss of a fleet without faults after `wanted` tokens."""
    with start(folder) as fleet:
        fleet.wait(lambda: tokens(fleet) >= wanted, seconds, f"{wanted:,.0f} tokens")
        return loss(fleet)


def started(
    folder: Path, options: argparse.Namespace, paces: Mapping[str, float], network: Network | None = None
) -> Fleet:
    """Start a fleet in a folder of its own; `paces`: the seconds of a step, by island."""
    home = folder.parent
    folder.mkdir()
    shutil.copytree(home / "text", folder / "text")
    shutil.copy(home / "fleet.yaml", folder)
    seconds = Seconds(options.heartbeat, options.reduce)
    arguments = ("--islands.min_members_to_start", str(len(paces)), "--sync.period", str(options.period))
    fleet = Fleet(folder, "fleet.yaml", seconds, arguments, True, network)
    for name, pace in paces.items():
        fleet.start(name, pace=pace)
    fleet.wait_for_members(list(paces), options.patience)
    return fleet


def network_of(options: argparse.Namespace) -> AbstractContextManager[Network | None]:
    """Return the network that the options describe; no network without them."""
    if options.bandwidth is None and options.round_trip_ms == 0:
        return nullcontext()
    # A packet between two sites passes two links, each with its delay.
    return rate_limited(len(NAMES), options.bandwidth, make=delayed(options.round_trip_ms / 4000))


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Cause a random fault every few seconds; return 1 if goodput or loss are worse than they should be."""
    source, paces = random.Random(options.seed), dict.fromkeys(NAMES, options.pace)
    times, gaps, begun, faults = IslandTimes(), RoundGaps(), time.monotonic(), 0
    with network_of(options) as network, started(folder / "soak", options, paces, network) as fleet:
        token = read_token(fleet.token, "islands.token_file")
        kinds = [each for each in options.faults if network is not None or each != "link"]
        while time.monotonic() - begun < 60 * options.soak:
            faults += 1
            what = disturb(fleet, source, kinds)
            print(f"{time.monotonic() - begun:6.0f} s  {what}; round {fleet.newest()}", flush=True)
            until = time.monotonic() + source.uniform(*options.every)
            while time.monotonic() < until:
                revive(fleet, options.pace)
                gaps.record(fleet)
                for island in fleet.living:
                    times.record(island, token)
                time.sleep(0.5)
            fleet.check()
        compared, trained, disturbed = fleet.check(), tokens(fleet), loss(fleet)
    print(
        f"\n{faults} faults in {options.soak:g} minutes; {compared} rounds compared, none differs.\n"
        f"Goodput of the living: {times.goodput:.1%} of {times.lived:.0f} s (waited {times.waited:.0f} s, healed "
        f"{times.healed:.0f} s); {times.joined} times a process joined, "
        f"{times.joining / max(1, times.joined):.1f} s after its server answered.\n"
        f"Longest time without a round: {gaps.longest:.1f} s. Times without a round and without a line that says why: "
        f"{len(gaps.unreported)}. {'; '.join(gaps.unreported)}",
        flush=True,
    )
    if options.skip_undisturbed:
        return int(times.goodput < LEAST_GOODPUT or bool(gaps.unreported))
    beside = undisturbed(folder / "beside", trained, partial(started, options=options, paces=paces), 60 * options.soak)
    print(f"Loss after {trained:,.0f} tokens: {disturbed:.4f}, undisturbed {beside:.4f}.")
    return int(times.goodput < LEAST_GOODPUT or bool(gaps.unreported) or disturbed > MOST_LOSS * beside)


def disturb(fleet: Fleet, source: random.Random, faults: Sequence[str]) -> str:
    """Cause a random fault; return its description."""
    living = fleet.living
    what = source.choice(faults)
    if what == "lighthouse":
        fleet.lighthouse.kill()
        fleet.lighthouse.wait()
        fleet.start_lighthouse()
        return "the lighthouse was killed and starts again"
    victims = source.sample(living, min(2 if what == "two" else 1, len(living)))
    names = " and ".join(island.name for island in victims)
    for island in victims:
        if what == "link" and fleet.network is not None:
            place = list(fleet.sites).index(island.name)
            fleet.network.cut(place)
            time.sleep(source.uniform(1, 10))
            fleet.network.restore(place)
        elif what == "stop":
            island.signal(signal.SIGSTOP)
            time.sleep(source.uniform(1, 10))
            island.signal(signal.SIGCONT)
        elif what in ("now", "two"):
            island.process.kill()
        else:
            island.doom.write_text(what)
    return f"{names}: {what}"


def revive(fleet: Fleet, pace: float) -> None:
    """Start the islands whose process has ended."""
    for island in list(fleet.islands.values()):
        if not island.lives:
            fleet.start(island.name, pace=pace)
