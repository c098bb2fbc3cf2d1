"""The modelled fleet: how fast each island steps and sends, what a round and a joiner cost, and who dies when.

fleet = Fleet(sites, schedule, ...)
outages = draw_outages(len(sites), mtbf_seconds, restart_seconds, seconds, seed)
outcome = World(fleet, outages, seconds).run()      # world.py: islands
outcome = data_parallel(fleet, ...)                 # data_parallel.py: what they are compared with
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from gregale.islands.protocol.settings import LAN, Timing
from gregale.methods.schedule import Schedule


class Site(NamedTuple):
    """One island: seconds of an inner step, and bytes a second that its link carries each way at the same time."""

    step_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Fleet:
    """What does not change during a run.

    - `sites`: the islands
    - `schedule`: H, P, tau
    - `message_bytes`: of one leg of a round, a whole fragment in the codec
    - `outer_bytes`, `inner_bytes`: what a joiner fetches; only the former changes with every round
    - `latency_seconds`: of a message from one island to another or to the coordinator
    - `timing`, `minimum`: of the protocol
    """

    sites: tuple[Site, ...]
    schedule: Schedule
    message_bytes: float
    outer_bytes: float
    inner_bytes: float
    latency_seconds: float = 0.0
    timing: Timing = field(default_factory=lambda: LAN)
    minimum: int = 1

    def interval(self, number: int) -> int:
        """Steps from the message of the round before to that of round `number`."""
        return self.schedule.round_step(number) - self.schedule.round_step(number - 1)

    def leg_bytes(self, members: int) -> float:
        """Bytes that one of so many members sends in a leg: (R - 1) / R of the message."""
        return (members - 1) / members * self.message_bytes

    def steps_per_second(self) -> float:
        """Of all islands, if none ever waits or fails."""
        return sum(1 / site.step_seconds for site in self.sites)


class Outage(NamedTuple):
    """Island `island` dies at `death`; a new process of it begins at `back`. Seconds since the fleet began."""

    death: float
    island: int
    back: float


def draw_sites(
    islands: int, step_seconds: float, bytes_per_second: float, spreads: tuple[float, float], seed: int
) -> tuple[Site, ...]:
    """Step times from 1 to 1 + the first spread times `step_seconds`, links from 1 / (1 + the second) to 1."""
    rng = random.Random(f"sites {seed}")
    speed, link = spreads
    return tuple(
        Site(step_seconds * (1 + speed * rng.random()), bytes_per_second / (1 + link * rng.random()))
        for _ in range(islands)
    )


def draw_outages(
    islands: int, mtbf_seconds: float, restart_seconds: float, seconds: float, seed: int
) -> tuple[Outage, ...]:
    """All outages of the run in the order of the deaths: an island that is up lives for Exp(`mtbf_seconds`)."""
    outages = []
    for island in range(islands):
        rng = random.Random(f"outages {seed} {island}")
        death = rng.expovariate(1 / mtbf_seconds)
        while death < seconds:
            outages.append(Outage(death, island, death + restart_seconds))
            death += restart_seconds + rng.expovariate(1 / mtbf_seconds)
    return tuple(sorted(outages))
