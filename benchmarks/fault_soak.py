"""What `faults.py --soak` measures: a fleet that trains for minutes, with a fault every few seconds.

Faults of islands: killed, stopped (SIGSTOP), cut off from the others in both directions or in one, poisoned with NaN.
Every stall line has to name a cause that `explains` knows, and every stall has to have a line.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

from benchmarks.latency import delayed
from gregale.distributed.agreement import read_token
from gregale.islands.transport.client import PeerUnreachable, RequestRejected, ask_status
from tests.fleet import Fleet, Island, Seconds, metrics
from tests.namespaces import Network, rate_limited

NAMES = ("a", "b", "c", "d")
ANSWERS_WITHIN = 5.0  # between two answers of one that lives
LAST = 50  # steps over which losses are averaged
LEAST_GOODPUT = 0.98
MOST_LOSS = 1.03  # of the undisturbed one
FRAGMENTS = 2
PORT = 29511
DOOMS = ("step", "reduce", "held")  # see `tests/doomed.py`
CUTS = {"link": "both", "link_sends": "sends", "link_receives": "receives"}
SOAK_FAULTS = (*DOOMS, "now", "two", "stop", "lighthouse", *CUTS)
POISON = "poison"
LASTS_SECONDS = 3.0, 20.0  # a stop or a cut
REPORTED_WITHIN = 3.0
EXPLAINS_FOR = 10.0  # seconds for which a fault explains stalls after all victims take part again
STALL = re.compile(r"No round for [\d.]+ s: (.*)")
BEGUN = re.compile(r"begins again from the outer parameters of round (\d+)")
OWN = re.compile(r"^this island (has made|is in the middle|fetches)")  # facts about an island's own work


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


@dataclass
class Disturbance:
    """A fault: its kind, its victims, and when it began. It explains stalls until shortly after it is settled.

    - `undo`, `until`: what ends it, and when; None: it has no duration
    - `settled`: when all victims took part in a round again
    """

    kind: str
    victims: tuple[str, ...]
    begun: float = field(default_factory=time.time)
    undo: Callable[[], None] | None = None
    until: float = 0.0
    settled: float | None = None

    def go_on(self, fleet: Fleet) -> None:
        """End it when its time is over, and find out whether it is settled."""
        if self.undo is not None:
            if time.time() < self.until:
                return
            self.undo()
            self.undo, self.begun = None, time.time()
        if any(fleet.islands[name].doom.exists() for name in self.victims):  # it has not come true yet
            self.begun = time.time()
        back = {s.island for s in fleet.observe() if s.ended > self.begun and not s.healed and s.weight > 0}
        if self.settled is None and (back.issuperset(self.victims) if self.victims else back):
            self.settled = time.time()

    @property
    def is_over(self) -> bool:
        return self.settled is not None and time.time() > self.settled + EXPLAINS_FOR

    def explains(self, island: str, reason: str) -> bool:
        """Return whether this fault is a right cause of a stall line of an island."""
        is_victim = island in self.victims
        if "this process was stopped" in reason:
            return self.kind == "stop" and is_victim
        if "coordinator has not answered" in reason or "heartbeats" in reason:
            return self.kind == "lighthouse" or (self.kind in CUTS and is_victim)
        if self.kind == "lighthouse":  # the new coordinator waits until all have found it
            return True
        if is_victim and (self.kind == "stop" or self.kind in CUTS):
            return "is being reduced by" in reason and "did not answer" not in reason  # it blames no other island
        return any(re.search(rf"\b{name}\b", reason) for name in self.victims)


@dataclass
class StallLines:
    """The stall lines of all islands, and those that no fault explains."""

    count: int = 0
    wrong: list[str] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)  # characters of a log

    def record(self, fleet: Fleet, faults: list[Disturbance]) -> None:
        """Judge the lines that were written since the last call."""
        for name, island in fleet.islands.items():
            said = island.said()
            whole = said.rfind("\n") + 1
            for found in STALL.finditer(said, self._read.get(name, 0), whole):
                self.count += 1
                if not OWN.search(found[1]) and not any(fault.explains(name, found[1]) for fault in faults):
                    causes = ", ".join(f"{each.kind} of {' and '.join(each.victims)}" for each in faults)
                    self.wrong.append(f"{name}: {found[0]} (faults: {causes or 'none'})")
            self._read[name] = whole


def tokens(fleet: Fleet) -> float:
    """Return the tokens of committed rounds."""
    return sum(each.weight for each in fleet.observe()) / FRAGMENTS


def rounds_to_contribute(fleet: Fleet) -> list[int]:
    """Return after how many rounds each island that began again contributed to one, in the order of islands."""
    found = []
    for island in fleet.islands.values():
        contributed = [each.round for each in fleet.observe() if each.island == island.name and each.weight > 0]
        begun = [int(line[1]) for line in BEGUN.finditer(island.said())]
        found += [min((each - number for each in contributed if each > number), default=-1) for number in begun]
    return found


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


class Sites(Fleet):
    """Islands that listen at one port, below those of clients (`Network.drop_incoming`), if each has a site."""

    def start(self, name: str, *options: str, **more):
        island = super().start
        if self.network is None:
            return island(name, *options, **more)
        if name not in self.sites:
            self.sites[name] = self.network.sites[len(self.sites)]
        site = self.sites[name]
        return island(name, *options, "--islands.bind", f"{site.address}:{PORT}", **more)


def started(
    folder: Path, options: argparse.Namespace, paces: Mapping[str, float], network: Network | None = None
) -> Fleet:
    """Start a fleet in a folder of its own; `paces`: the seconds of a step, by island."""
    home = folder.parent
    folder.mkdir()
    shutil.copytree(home / "text", folder / "text")
    shutil.copy(home / "fleet.yaml", folder)
    seconds = Seconds(options.heartbeat, options.reduce)
    lease = round(2 * max(LASTS_SECONDS) / options.pace)  # an island that is cut off trains on
    arguments = ("--islands.min_members_to_start", str(len(paces)), "--sync.period", str(options.period))
    arguments += ("--islands.lease_steps", str(lease))
    if options.coordinators > 1:
        arguments += ("--islands.min_members", str(len(paces) // 2))
    fleet = Sites(folder, "fleet.yaml", seconds, arguments, True, network, coordinators=options.coordinators)
    for name, pace in paces.items():
        fleet.start(name, pace=pace)
    for place in range(len(paces) - options.outwards, len(paces)) if network else ():
        network.drop_incoming(place)
    fleet.wait_for_members(list(paces), options.patience)
    return fleet


def network_of(options: argparse.Namespace) -> AbstractContextManager[Network | None]:
    """Return the network that the options describe; no network without root."""
    if options.bandwidth is None and options.round_trip_ms == 0:
        return rate_limited(len(NAMES), None) if os.geteuid() == 0 else nullcontext()
    # A packet between two sites passes two links, each with its delay.
    return rate_limited(len(NAMES), options.bandwidth, make=delayed(options.round_trip_ms / 4000))


class Soak:
    """A fleet, the faults in it that are not over, and what was observed."""

    def __init__(self, fleet: Fleet, options: argparse.Namespace):
        self.fleet, self._options, self._source = fleet, options, random.Random(options.seed)
        self._token = read_token(fleet.token, "islands.token_file")
        self._kinds = [each for each in options.faults if fleet.network is not None or each not in CUTS]
        self._active: list[Disturbance] = []
        self._next = self._next_poison = self.begun = time.time()
        self.times, self.gaps, self.lines = IslandTimes(), RoundGaps(), StallLines()
        self.counts: Counter[str] = Counter()
        self.ended: list[str] = []  # processes that have ended by themselves

    def run(self) -> None:
        """Disturb the fleet for the time of the options; then end all faults, and wait until all take part again."""
        while time.time() - self.begun < 60 * self._options.soak:
            self._begin_faults()
            self._observe()
        patience = time.time() + self._options.patience
        while any(fault.settled is None for fault in self._active) and time.time() < patience:
            self._observe()
        unsettled = [f"{fault.kind} of {' and '.join(fault.victims)}" for fault in self._active if not fault.settled]
        assert not unsettled, f"not settled after {self._options.patience:g} s: {unsettled}\n{self.fleet.tails()}"

    def _begin_faults(self) -> None:
        now = time.time()
        if now >= self._next and not any(fault.undo for fault in self._active):
            self._begin(self._source.choice(self._kinds))
            self._next = max(now, self._active[-1].until) + self._source.uniform(*self._options.every)
        if self._options.poison_every and now >= self._next_poison and self._begin(POISON):
            self._next_poison = now + self._options.poison_every

    def _begin(self, kind: str) -> bool:
        """Begin a fault of islands that no other fault has, if there are any."""
        fleet, busy = self.fleet, {name for fault in self._active if not fault.settled for name in fault.victims}
        free = [island for island in fleet.living if island.name not in busy]
        count = {"lighthouse": 0, "two": 2}.get(kind, 1)
        if len(free) < count:
            return False
        victims = self._source.sample(free, count)
        fault = Disturbance(kind, tuple(island.name for island in victims))
        lasts = self._source.uniform(*LASTS_SECONDS)
        if kind == "lighthouse":
            fleet.lighthouse.kill()
            fleet.lighthouse.wait()
            if self._options.coordinators > 1:
                fault.undo, fault.until = fleet.start_lighthouse, fault.begun + lasts
            else:
                fleet.start_lighthouse()
        for island in victims:
            if kind in CUTS:
                place = list(fleet.sites).index(island.name)
                assert fleet.network is not None
                fleet.network.cut(place, CUTS[kind])
                fault.undo, fault.until = partial(fleet.network.restore, place), fault.begun + lasts
            elif kind == "stop":
                island.signal(signal.SIGSTOP)
                fault.undo, fault.until = partial(island.signal, signal.SIGCONT), fault.begun + lasts
            elif kind in ("now", "two"):
                island.process.kill()
                island.process.wait()
            else:
                island.doom.write_text(kind)
        self._active.append(fault)
        self.counts[kind] += 1
        lasting = f" for {lasts:.1f} s" if fault.undo else ""
        names = " and ".join(fault.victims) or "the coordinator"
        print(f"{fault.begun - self.begun:6.0f} s  {names}: {kind}{lasting}; round {fleet.newest()}", flush=True)
        return True

    def _observe(self) -> None:
        """Look at everything once, and start the islands whose process has ended."""
        fleet = self.fleet
        for island in list(fleet.islands.values()):
            if not island.lives:
                if island.process.returncode != -signal.SIGKILL:
                    self.ended.append(f"{island.name}, exit code {island.process.returncode}: {island.said()[-500:]}")
                fleet.start(island.name, pace=self._options.pace)
        for fault in self._active:
            fault.go_on(fleet)
        self.gaps.record(fleet)
        self.lines.record(fleet, self._active)
        self._active = [fault for fault in self._active if not fault.is_over]
        closed = list(fleet.sites)[len(fleet.sites) - self._options.outwards :]
        stopped = {*closed, *(name for fault in self._active if fault.undo for name in fault.victims)}
        for island in fleet.living:
            if island.name not in stopped:  # it would not answer
                self.times.record(island, self._token)
        fleet.check()
        time.sleep(0.3)


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Cause random faults for minutes; return 1 if an observation is not as it should be."""
    paces = dict.fromkeys(NAMES, options.pace)
    with network_of(options) as network, started(folder / "soak", options, paces, network) as fleet:
        found = Soak(fleet, options)
        found.run()
        compared, trained, disturbed = fleet.check(), tokens(fleet), loss(fleet)
        rounds = rounds_to_contribute(fleet)
    times, gaps, lines = found.times, found.gaps, found.lines
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.counts.items()))
    print(
        f"\n{found.counts.total()} faults in {options.soak:g} minutes ({kinds}).",
        f"{compared} rounds compared, none differs.",
        f"Goodput of the living: {times.goodput:.1%} of {times.lived:.0f} s (waited {times.waited:.0f} s, healed "
        f"{times.healed:.0f} s); {times.joined} times a process joined, "
        f"{times.joining / max(1, times.joined):.1f} s after its server answered.",
        f"Longest time without a round: {gaps.longest:.1f} s. Stalls without a line: {len(gaps.unreported)}.",
        f"Stall lines: {lines.count}, of which {len(lines.wrong)} name a wrong cause.",
        f"Islands that were poisoned contributed after {sorted(rounds)} rounds.",
        f"Processes that ended by themselves: {len(found.ended)}.",
        *gaps.unreported,
        *lines.wrong,
        *found.ended,
        sep="\n",
        flush=True,
    )
    is_bad = times.goodput < LEAST_GOODPUT or bool(gaps.unreported or lines.wrong or found.ended)
    if options.skip_undisturbed:
        return int(is_bad)
    beside = undisturbed(folder / "beside", trained, partial(started, options=options, paces=paces), 60 * options.soak)
    print(f"Loss after {trained:,.0f} tokens: {disturbed:.4f}, undisturbed {beside:.4f}.")
    return int(is_bad or disturbed > MOST_LOSS * beside)
