"""Islands of unequal speed: the slow one contributes, and nobody waits for it."""

from functools import cache
from itertools import product

import pytest

from gregale.islands.protocol.member import GRACE_STEPS, Member
from gregale.islands.protocol.messages import LAN, WAN
from gregale.methods.schedule import Schedule
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.speeds import Pace, check, check_copies, paces

NETWORKS = {"lan": (LAN, 0.3), "wan": (WAN, 3.0), "long": (WAN, 15.0)}  # with the seconds of a step
STEPS = 240  # of the fast islands
FAST = 3


@cache
def alone(network: str, schedule: Schedule) -> Pace:
    timing, seconds = NETWORKS[network]
    return paces([seconds] * FAST, timing, schedule, STEPS * seconds)[0]


def run(network: str, delay: int, fragments: int, slower: float, kind: type[Member] = Member) -> None:
    """Run a fleet with an island that is slower by this factor, and check it."""
    timing, seconds = NETWORKS[network]
    schedule = Schedule(6 * max(fragments, 2), fragments, delay, fragments)
    found = paces([seconds] * FAST + [seconds * slower], timing, schedule, STEPS * seconds, kind)
    check(found, alone(network, schedule), schedule)


CASES = [
    ("lan", 1, 2, 4), ("lan", 1, 2, 8), ("lan", 1, 2, 20), ("lan", 2, 8, 1.4), ("lan", 0, 2, 20), ("wan", 1, 1, 50),
    ("wan", 1, 2, 10), ("wan", 0, 3, 3), ("long", 1, 2, 1.4),
]  # fmt: skip
FACTORS = (1, 1.2, 1.4, 1.5, 1.6, *range(2, 16), 20, 25, 31, 40, 50)


@pytest.mark.parametrize(("network", "delay", "fragments", "slower"), CASES)
def test_a_slow_island_contributes_and_brakes_nobody(network, delay, fragments, slower):
    run(network, delay, fragments, slower)


def run_copies(network: str, delay: int, fragments: int, steps: float, kind: type[Member] = Member) -> None:
    """Run a fleet of equal steps with an island whose messages take so many steps to its host, and check it."""
    timing, seconds = NETWORKS[network]
    schedule = Schedule(6 * max(fragments, 2), fragments, delay, fragments)
    found = paces([seconds] * (FAST + 1), timing, schedule, STEPS * seconds, kind, copy_seconds=steps * seconds)
    check_copies(found, alone(network, schedule), schedule, steps * seconds)


@pytest.mark.parametrize(
    ("network", "delay", "fragments", "steps"),
    [("wan", 1, 2, 3.3), ("lan", 1, 2, 10), ("wan", 2, 4, 30), ("lan", 0, 2, 5)],
)
def test_an_island_with_long_copies_contributes_and_brakes_nobody(network, delay, fragments, steps):
    run_copies(network, delay, fragments, steps)


@pytest.mark.soak
@pytest.mark.parametrize("network", NETWORKS)
def test_no_island_with_long_copies_is_left_out_or_brakes_the_others(network):
    for delay, fragments, steps in product((0, 1, 2), (1, 2, 3, 5, 8), (0.1, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 50)):
        run_copies(network, delay, fragments, steps)


@pytest.mark.soak
@pytest.mark.parametrize("network", NETWORKS)
def test_no_slow_island_is_left_out_or_brakes_the_others(network):
    for delay, fragments, slower in product((0, 1, 2), (1, 2, 3, 5, 8), FACTORS):
        run(network, delay, fragments, slower)


@pytest.mark.parametrize(
    ("network", "schedule", "steps"),
    [
        ("lan", Schedule(6, 1), 15),
        ("lan", Schedule(6, 1), 12),
        ("lan", Schedule(12, 4, 0, 4), 40),
        ("wan", Schedule(12, 4, 3, 4), 38),
        ("wan", Schedule(10, 3, 1, 4), 40),
        ("lan", Schedule(10, 3, 3, 4), 5),
    ],
)
@pytest.mark.parametrize("slower", [1, 1.3, 7])
def test_a_run_ends_with_all_steps_of_all_islands(network, schedule, steps, slower):
    timing, seconds = NETWORKS[network]
    found = paces([seconds] * FAST + [seconds * slower], timing, schedule, 3 * steps * seconds + 60, steps=steps)
    assert [each.left for each in found] == [[0.0] * schedule.fragments] * len(found)
    assert {len(each.steps) for each in found[:FAST]} == {steps}
    assert {len(each.rounds) for each in found} == {schedule.rounds(steps - 1) + schedule.fragments}


class NeverEarly(Member):
    """Hands messages over only when rounds are due."""

    def _is_slow(self):
        return False


class WaitsForTheSlowest(NeverEarly):
    """Waits for its own step, however long it is."""

    def _grace(self):
        return 2 * self.handover.step_seconds


class Forgets(Member):
    """Drops a message that a round has not used."""

    def _commit(self, *arguments):
        super()._commit(*arguments)
        self.handover.state_replaced()


class WaitsLonger(Member):
    """Waits in the first round, too, for one and a half of its own steps."""

    def _grace(self):
        return super()._grace() if self._fastest else GRACE_STEPS * self.handover.step_seconds


class WaitsForItsCopy(Member):
    """Waits for the copy of its own message, however long that takes."""

    def _grace(self):
        return super()._grace() + 2 * self.handover.copy_seconds


class AnswersNoEarlyMessage(Member):
    def _on_early_message(self, event):
        pass


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (NeverEarly, ("lan", 1, 2, 20)),
        (WaitsForTheSlowest, ("lan", 1, 2, 8)),
        (Forgets, ("wan", 1, 2, 10)),
        (WaitsLonger, ("wan", 1, 1, 5)),
        (AnswersNoEarlyMessage, ("wan", 1, 1, 50)),
    ],
)
def test_a_planted_mistake_is_found(kind, case):
    with pytest.raises(BrokenError):
        run(*case, kind=kind)


@pytest.mark.parametrize(("kind", "case"), [(WaitsForItsCopy, ("wan", 1, 2, 3.3)), (NeverEarly, ("lan", 1, 2, 10))])
def test_a_planted_mistake_in_copies_is_found(kind, case):
    with pytest.raises(BrokenError):
        run_copies(*case, kind)
