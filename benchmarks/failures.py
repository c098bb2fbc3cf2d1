"""The share of useful steps of islands that fail: the islands' own state machines beside `gregale simulate --failures`.

    python -m benchmarks.failures [--islands 10 30] [--days 4]

Islands with the real coordinator and state machines, in simulated time, stop at random and come back with an empty
disk. A step is useful if a round has it.
"""

import argparse
from dataclasses import replace

from gregale.failures import Division, Failures, islands
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import WAN
from gregale.methods.schedule import Schedule
from tests.islands.simulator.speeds import Observed
from tests.islands.simulator.trainer import BATCH

STEP_SECONDS, PERIOD = 10.0, 30
RESTART_SECONDS, HEAL_SECONDS = 300.0, 60.0
DAY = 86_400.0


class Failing(Observed):
    """A fleet of equal islands, each of which fails after exponentially distributed seconds with mean `mtbf`."""

    def __init__(self, count: int, mtbf: float):
        super().__init__([STEP_SECONDS] * count, WAN, Schedule(PERIOD, 1), Member)
        self.rules = replace(self.rules, minimum=1, start=1)
        self.heal_seconds, self.mtbf, self.failures = 2 * HEAL_SECONDS, mtbf, 0  # uniform, so that this is the mean
        for name in self.paces:
            self.later(1 + self.rng.expovariate(1 / mtbf), lambda name=name: self.fail(name))

    def fail(self, name: str) -> None:
        if self.nodes[name].alive:
            self.failures += 1
            self.kill(name)
            self.later(RESTART_SECONDS, lambda: self.start(name, fresh=True))
        self.later(self.rng.expovariate(1 / self.mtbf), lambda: self.fail(name))

    def useful_share(self, seconds: float) -> float:
        """Run so long; return the steps that rounds have, over those that all islands could make without failures."""
        found = self.after(seconds)
        steps = sum(weight for each in found for _, weight in each.rounds) / BATCH
        return steps * STEP_SECONDS / (len(found) * seconds)


def expected(count: int, mtbf: float) -> float:
    chips = Failures(mtbf, 1, RESTART_SECONDS, 0.0, 0.0, 0.0)  # an island is one chip here
    return islands(chips, Division(count, count, PERIOD * STEP_SECONDS, HEAL_SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--islands", type=int, nargs="+", default=[3, 10, 30])
    parser.add_argument("--hours", type=float, nargs="+", default=[100.0, 10.0, 3.0, 1.0], help="mtbf of an island")
    parser.add_argument("--days", type=float, default=4.0, help="of simulated time")
    options = parser.parse_args()
    print("| islands | hours between failures of one | failures | share, state machines | by `simulate` |")
    print("|---|---|---|---|---|")
    for count in options.islands:
        for hours in options.hours:
            fleet = Failing(count, 3600 * hours)
            share = fleet.useful_share(options.days * DAY)
            formula = expected(count, 3600 * hours)
            print(f"| {count} | {hours:g} | {fleet.failures} | {share:.1%} | {formula:.1%} |", flush=True)


if __name__ == "__main__":
    main()
