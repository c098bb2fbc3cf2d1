"""Fleets of islands of unequal speed without faults: who contributes, who is waited for, who heals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gregale.islands.protocol.member import Member
from gregale.islands.protocol.settings import Rules, Timing
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.trainer_command import RoundPacing
from gregale.methods.schedule import Schedule
from tests.islands.simulator.world import Weather, World


@dataclass
class Pace:
    """What became of one island.

    - `steps`: times of the ends of its steps
    - `rounds`: time and weight of the rounds that it committed
    - `heals`: states that it took over
    """

    steps: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    heals: int = 0


class Observed(World):
    """A world that notes each island's `Pace`."""

    def __init__(self, step_seconds: Sequence[float], timing: Timing, schedule: Schedule, member_class: type[Member]):
        super().__init__(0, member_class)
        self.timing, self.rules = timing, Rules(start=len(step_seconds), fragments=(schedule.fragments,))
        self.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0)
        self.pace = RoundPacing(schedule, 10**9, False, REDUCES * timing.reduce_seconds)
        self.step_seconds = {f"i{index}": seconds for index, seconds in enumerate(step_seconds)}
        self.paces = {name: Pace() for name in self.step_seconds}
        for name in self.step_seconds:
            self.later(self.rng.random(), lambda name=name: self.start(name))

    def step(self, node):
        self.paces[node.name].steps.append(self.now)

    def committed(self, node, action, digest):
        super().committed(node, action, digest)
        self.paces[node.name].rounds.append((self.now, action.weight))

    def installed(self, node, outer):
        super().installed(node, outer)
        self.paces[node.name].heals += 1


def paces(
    step_seconds: Sequence[float],
    timing: Timing,
    schedule: Schedule,
    seconds: float,
    member_class: type[Member] = Member,
) -> list[Pace]:
    """Return what became of islands with these steps after so many seconds."""
    world = Observed(step_seconds, timing, schedule, member_class)
    world.run_until(seconds)
    return list(world.paces.values())
