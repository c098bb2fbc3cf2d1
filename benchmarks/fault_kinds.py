"""The faults of `faults.py`: what is done to a fleet, and what is waited for."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from tests.fleet import Fleet, Island

STOPPED_SECONDS = 10.0
Times = tuple[float | None, float | None]


@dataclass
class Run:
    """A fleet and the names of its islands; `patience` seconds are waited for anything."""

    fleet: Fleet
    names: tuple[str, ...]
    patience: float

    def ready(self) -> None:
        """All live and make rounds together."""
        for name in self.names:
            if not self.fleet.islands[name].lives:
                self.fleet.start(name)
        self.fleet.wait_for_members(self.names, self.patience, self.fleet.newest())

    def again(self, dead: Sequence[str], since: float) -> float:
        """Seconds from `since` until the others have committed a round without the dead ones, of any before it."""
        before, others = self.fleet.newest(*dead), set(self.names) - set(dead)

        def commits() -> list[float]:
            return [
                each.ended - since
                for each in self.fleet.observe()
                if each.ended > since and not each.healed and set(each.members) <= others and each.round > before
            ]

        self.fleet.wait(commits, self.patience, f"a round without {', '.join(dead)}")
        return min(commits())

    def back(self, names: Sequence[str], since: float) -> float:
        """Seconds from `since` until each of these has contributed to a round that was not under way then."""
        newest = self.fleet.newest()

        def commits(name: str) -> list[float]:
            return [
                each.ended - since
                for each in self.fleet.observe()
                if each.island == name and each.round > newest + 1 and not each.healed and each.weight > 0
            ]

        self.fleet.wait(lambda: all(map(commits, names)), self.patience, f"{', '.join(names)} take part again")
        return max(min(commits(name)) for name in names)

    def dies(self, name: str, point: str) -> float:
        """An island dies at a point of `doomed.py`; returns when."""
        island = self.fleet.islands[name]
        island.doom.write_text(point)
        self.fleet.wait(lambda: not island.lives, self.patience, f"{name} dies at {point}")
        return time.time()

    def starts(self, *names: str) -> float:
        """Starts dead islands again; returns how long it took until all took part."""
        since = time.time()
        for name in names:
            self.fleet.start(name)
        return self.back(names, since)


def dies_at(point: str) -> Callable[[Run], Times]:
    """One island dies at a point of a round."""

    def happens(run: Run) -> Times:
        since = run.dies("c", point)
        return run.again(["c"], since), run.starts("c")

    return happens


def source_dies(run: Run) -> Times:
    """d is started again, and one of those that it heals from dies with a part sent."""
    run.fleet.islands["d"].kill()
    run.again(["d"], time.time())
    run.fleet.islands["b"].doom.write_text("healing-other")
    begun = time.time()
    run.fleet.start("d")
    run.fleet.wait(lambda: not run.fleet.islands["b"].lives, run.patience, "b dies while it heals d")
    since = time.time()
    again = run.again(["b"], since)
    run.back(["d"], begun)
    return again, run.starts("b")


def joiner_dies(run: Run) -> Times:
    """d is started again, and dies with a part of the state there."""
    run.fleet.islands["d"].kill()
    run.again(["d"], time.time())
    run.fleet.start("d")
    since = run.dies("d", "healing")
    return run.again(["d"], since), run.starts("d")


def stops(run: Run) -> Times:
    """SIGSTOP, for longer than a heartbeat, and SIGCONT."""
    island = run.fleet.islands["b"]
    island.signal(signal.SIGSTOP)
    since = time.time()
    try:
        again = run.again(["b"], since)
        time.sleep(max(0.0, since + STOPPED_SECONDS - time.time()))
    finally:
        island.signal(signal.SIGCONT)
    return again, run.back(["b"], time.time())


def lighthouse_dies(run: Run) -> Times:
    """The coordinator is killed, and another one listens at its address."""
    run.fleet.lighthouse.kill()
    run.fleet.lighthouse.wait()
    time.sleep(1.0)
    log = run.fleet.folder / "lighthouse.log"
    log.unlink()
    run.fleet.start_lighthouse()
    run.fleet.wait(lambda: "listens at" in log.read_text(), run.patience, "the lighthouse listens")
    since, newest = time.time(), run.fleet.newest()
    run.fleet.wait(lambda: run.fleet.newest() > newest, run.patience, "a round after the lighthouse came back")
    again = time.time() - since
    return again, run.back(run.names, since)


def link_is_cut(run: Run) -> Times:
    """Packets from and to an island vanish, and nobody is told."""
    assert run.fleet.network is not None
    place = run.names.index("c")
    run.fleet.network.cut(place)
    since = time.time()
    try:
        again = run.again(["c"], since)
        time.sleep(max(0.0, since + STOPPED_SECONDS - time.time()))
    finally:
        run.fleet.network.restore(place)
    return again, run.back(["c"], time.time())


def several_die(*names: str) -> Callable[[Run], Times]:
    """Several islands are killed at once."""

    def happens(run: Run) -> Times:
        for name in names:
            run.fleet.islands[name].process.kill()
        since = time.time()
        for name in names:
            run.fleet.islands[name].process.wait()
        return run.again(names, since), run.starts(*names)

    return happens


def disk_is_full(run: Run) -> Times:
    """An island's run directory has no room any more; later it has some again."""
    island = run.fleet.islands["d"]
    island.kill()
    run.again(["d"], time.time())
    kept = island.run.with_name("d.kept")
    island.run.rename(kept)
    island.run.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(island.run)], check=True)
    except (OSError, subprocess.CalledProcessError):
        island.run.rmdir()
        kept.rename(island.run)
        run.starts("d")
        raise AssertionError("a small disk takes root (mount -t tmpfs)") from None
    try:
        run.starts("d")
        filler = island.run / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        since = time.time()
        island = run.fleet.islands["d"]
        run.fleet.wait(lambda: "could not be saved" in island.said(), run.patience, "d says that its disk is full")
        newest = run.fleet.newest()
        again = run.again([], since)
        run.fleet.wait_for_members(run.names, run.patience, newest)
        filler.unlink()
        since = time.time()
        saved = island.said().count("is saved")
        run.fleet.wait(lambda: island.said().count("is saved") > saved, run.patience, "d saves again")
        back = run.back(["d"], since)
    finally:
        _replace(run.fleet.islands["d"])
        kept.rename(island.run)
    return again, back


def _replace(island: Island) -> None:
    island.kill()
    subprocess.run(["umount", "-l", str(island.run)], check=True)
    island.run.rmdir()


class Fault(NamedTuple):
    """`happens`: does it; returns seconds until the others commit again, and until all take part again."""

    key: str
    name: str
    happens: Callable[[Run], Times]


FAULTS = (
    Fault("step", "kill -9 in an inner phase", dies_at("step")),
    Fault("reduce", "kill -9 in the middle of a reduce", dies_at("reduce")),
    Fault("held", "kill -9 between reduce and commit", dies_at("held")),
    Fault("healing-other", "kill -9 of a peer from which an island heals", source_dies),
    Fault("healing", "kill -9 of an island that heals", joiner_dies),
    Fault("stop", "SIGSTOP for 10 s, SIGCONT", stops),
    Fault("lighthouse", "coordinator killed and restarted", lighthouse_dies),
    Fault("link", "link cut for 10 s, and restored", link_is_cut),
    Fault("two", "two killed at once", several_die("b", "c")),
    Fault("three", "all but one killed at once", several_die("b", "c", "d")),
    Fault("disk", "full disk under a run's checkpoints", disk_is_full),
)
