"""Fleets of islands of unequal speed without faults: who contributes, who is waited for, who heals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gregale.islands.protocol.member import GRACE_STEPS, Member
from gregale.islands.protocol.messages import Rules, Timing
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.trainer_command import RoundPacing
from gregale.methods.schedule import Schedule
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.world import Weather, World


@dataclass
class Pace:
    """What became of one island.

    - `steps`: times of the ends of its steps
    - `rounds`: time and weight of the rounds that it committed
    - `heals`: states that it took over
    - `left`: tokens that no round has, by fragment, once the run is complete
    """

    steps: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    heals: int = 0
    left: list[float] | None = None


class Observed(World):
    """A world that notes each island's `Pace`.

    - `steps`: of the run
    - `copy_seconds`: from a handover of the last island until its message is on the host; 0: as of the others
    """

    def __init__(
        self,
        step_seconds: Sequence[float],
        timing: Timing,
        schedule: Schedule,
        member_class: type[Member],
        steps: int = 10**9,
        copy_seconds: float = 0.0,
    ):
        super().__init__(0, member_class)
        fragments, closing = (schedule.fragments,), schedule.rounds(steps - 1)
        self.timing, self.rules = timing, Rules(start=len(step_seconds), fragments=fragments, closing=closing)
        self.weather = Weather(0.0, 0.0, 0.0, 0.0, 0.0)
        self.pace = RoundPacing(schedule, steps, False, REDUCES * timing.reduce_seconds)
        self.step_seconds = {f"i{index}": seconds for index, seconds in enumerate(step_seconds)}
        self.copy_seconds = {f"i{len(step_seconds) - 1}": copy_seconds}
        self.paces = {name: Pace() for name in self.step_seconds}
        for name in self.step_seconds:
            self.later(self.rng.random(), lambda name=name: self.start(name))

    def after(self, seconds: float) -> list[Pace]:
        """Return what has become of the islands after so many seconds."""
        self.run_until(seconds)
        return list(self.paces.values())

    def step(self, node):
        self.paces[node.name].steps.append(self.now)

    def committed(self, node, action, digest):
        super().committed(node, action, digest)
        self.paces[node.name].rounds.append((self.now, action.weight))

    def completed(self, node, steps, tokens):
        super().completed(node, steps, tokens)
        self.paces[node.name].left = tokens

    def installed(self, node, outer):
        super().installed(node, outer)
        self.paces[node.name].heals += 1


def check_others(found: Sequence[Pace], alone: Pace, schedule: Schedule, wait_steps: float = GRACE_STEPS) -> None:
    """Raise `BrokenError` if an island heals, or the last one brakes the others.

    - `wait_steps`: with tau = 0 a round takes as many steps longer
    """
    if heals := [each.heals for each in found if each.heals]:
        raise BrokenError(f"islands heal without a fault: {heals}")
    share = 0.95 if schedule.delay else 1 / (1 + wait_steps / (schedule.period / schedule.fragments))
    if len(found[0].rounds) < share * len(alone.rounds):
        raise BrokenError(f"{len(found[0].rounds)} rounds in place of {len(alone.rounds)}")


def check_copies(found: Sequence[Pace], alone: Pace, schedule: Schedule, copy_seconds: float) -> None:
    """Raise `BrokenError` if the last island, whose copies take longer, brakes the others, heals, or contributes to no
    round within two copies and two periods."""
    check_others(found, alone, schedule, GRACE_STEPS + 0.5)  # and a copy of the others, and a request
    period = schedule.fragments * (alone.rounds[-1][0] - alone.rounds[0][0]) / (len(alone.rounds) - 1)
    times = [found[-1].rounds[0][0], *(at for at, weight in found[-1].rounds if weight), found[-1].rounds[-1][0]]
    if (longest := max(np.diff(times))) > 2 * (copy_seconds + period):
        raise BrokenError(f"an island with copies of {copy_seconds:g} s contributes to no round for {longest:.0f} s")


def check(found: Sequence[Pace], alone: Pace, schedule: Schedule) -> None:
    """Raise `BrokenError` if a slow island brakes the others, is left out, or heals.

    - `found`: of islands of which the last one is slower than the others, which are equal
    - `alone`: of one of the others without it
    """
    slow = found[-1]
    check_others(found, alone, schedule)
    ends = [at for at in slow.steps if at > slow.rounds[0][0]]
    for begin, end in zip(ends, ends[3:], strict=False):
        inside = [weight for at, weight in slow.rounds if begin < at <= end]
        if len(inside) >= 3 and not any(inside):
            raise BrokenError(f"{len(inside)} rounds in three steps of the slow island, from {begin:.1f} s, without it")
    for begin, end in zip(ends, ends[2 * schedule.period :], strict=False):
        contributed = {schedule.round_fragment(n) for n, (at, w) in enumerate(slow.rounds) if begin < at <= end and w}
        if len(contributed) < schedule.fragments:
            raise BrokenError(f"of {schedule.fragments} fragments only {contributed} have steps of the slow island")
