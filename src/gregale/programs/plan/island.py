"""Provides the costs of an island besides its steps: network traffic, host memory, and device memory of a fragment."""

from dataclasses import dataclass, replace
from typing import Any

from gregale.audit.chips import GBIT
from gregale.audit.roofline import Roofline
from gregale.methods.island import Island
from gregale.methods.island_traffic import IslandTraffic
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig

SHOWN_GBIT_PER_SECOND = (0.05, 0.2, 1.0, 10.0, 100.0)
MIN_MEMBERS = 2
NO_COORDINATOR = "planned:0"  # a plan connects to no coordinator


def as_island(config: TrainConfig, count: int | None) -> TrainConfig:
    """Return the configuration of one island of `count`; None: the configuration unchanged."""
    if count is None or config.islands.lighthouse is not None:
        return config
    return replace(config, islands=replace(config.islands, lighthouse=NO_COORDINATOR))


@dataclass(frozen=True)
class IslandPlan:
    """One island of a fleet of equal islands, all of which are members."""

    traffic: IslandTraffic
    hosts: int  # hosts of the island; each sends its own shards over its own link
    lockstep: bool  # see `IslandTraffic.period_seconds`

    def to_dict(self, bound: Roofline | None, gbit_per_second: float | None) -> dict[str, Any]:
        """Return all estimates for JSON; without a roofline of the step they have no times.

        - `gbit_per_second`: the requested link of one host, if any
        """
        traffic, schedule = self.traffic, self.traffic.island.schedule
        seconds = None if bound is None else bound.overlapped
        asked = () if gbit_per_second is None else (gbit_per_second,)
        links: list[float] = sorted({*SHOWN_GBIT_PER_SECOND, *asked})
        return {
            "members": traffic.members,
            "hosts": self.hosts,
            "period": schedule.period,
            "fragments": schedule.fragments,
            "delay": schedule.delay,
            "bytes_per_round": max(traffic.bytes_sent(index) for index in range(schedule.fragments)),
            "bytes_per_period": traffic.bytes_a_period(),
            "host_bytes": traffic.host_bytes(),
            "host_bytes_in_flight": traffic.host_bytes_in_flight(),
            "device_bytes": traffic.device_bytes(),
            "device_bytes_in_flight": traffic.device_bytes_in_flight(),
            "step_seconds": seconds,
            "hidden_gbit_per_second": None if seconds is None else self._hidden(seconds),
            "links": {} if seconds is None else {f"{link:g}": self._at(link, seconds) for link in links},
        }

    def _at(self, gbit_per_second: float, step_seconds: float) -> dict[str, float]:
        """Return the longest round, and compute time / elapsed time, on a host link with this rate each way."""
        traffic, speed = self.traffic, gbit_per_second * GBIT
        fragments = range(traffic.island.schedule.fragments)
        period = traffic.period_seconds(step_seconds, speed, self.lockstep)
        return {
            "round_seconds": max(traffic.seconds(index, speed) for index in fragments),
            "utilisation": traffic.island.schedule.period * step_seconds / period,
        }

    def _hidden(self, step_seconds: float) -> float | None:
        """Return the host link in Gbit/s on which no step waits for a round; None: each round delays a step."""
        schedule, needed = self.traffic.island.schedule, 0.0
        for number in range(schedule.fragments):
            steps = self.traffic.hiding_steps(number, self.lockstep)
            if steps == 0:
                return None
            sent = self.traffic.bytes_sent(schedule.round_fragment(number))
            needed = max(needed, sent / (steps * step_seconds) / GBIT)
        return needed


def island_of(setup: Setup, count: int | None) -> IslandPlan | None:
    """Return the plan of an island; None if the run is no island.

    - `count`: number of islands; None: the configured minimum, and at least two
    """
    if not isinstance(setup.method, Island):
        return None
    islands = setup.config.islands
    members = count or max(MIN_MEMBERS, islands.min_members_to_start, islands.min_members)
    hosts = len({device.process_index for device in setup.layout.mesh.devices.flat})
    return IslandPlan(IslandTraffic(setup.method, members), hosts, islands.lockstep)
