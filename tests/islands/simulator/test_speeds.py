"""Islands of unequal speed: the slow one contributes, and nobody waits for it."""

from functools import cache
from itertools import product

import pytest

from gregale.islands.protocol.member import GRACE_STEPS, Member
from gregale.islands.protocol.messages import LAN, WAN
from gregale.methods.schedule import Schedule
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.speeds import Observed, Pace, check, check_copies

NETWORKS = {"lan": (LAN, 0.3), "wan": (WAN, 3.0), "long": (WAN, 15.0)}  # with the seconds of a step
STEPS = 240  # of the fast islands
FAST = 3


@cache
def alone(network: str, schedule: Schedule) -> Pace:
    timing, seconds = NETWORKS[network]
    return Observed([seconds] * FAST, timing, schedule, Member).after(STEPS * seconds)[0]


def run(network: str, delay: int, fragments: int, slower: float, copy: float) -> None:
    """Run a fleet, with an island that is slower by a factor or whose messages take so many steps to its host."""
    timing, seconds = NETWORKS[network]
    schedule = Schedule(6 * max(fragments, 2), fragments, delay, fragments)
    steps, copy_seconds = [seconds] * FAST + [seconds * slower], copy * seconds
    found = Observed(steps, timing, schedule, Member, copy_seconds=copy_seconds).after(STEPS * seconds)
    if copy:
        check_copies(found, alone(network, schedule), schedule, copy_seconds)
    else:
        check(found, alone(network, schedule), schedule)


CASES = [
    ("lan", 1, 2, 4, 0), ("lan", 1, 2, 8, 0), ("lan", 1, 2, 20, 0), ("lan", 2, 8, 1.4, 0), ("lan", 0, 2, 20, 0),
    ("wan", 1, 1, 50, 0), ("wan", 1, 2, 10, 0), ("wan", 0, 3, 3, 0), ("long", 1, 2, 1.4, 0), ("lan", 0, 2, 1.5, 0),
    ("wan", 1, 2, 1, 3.3), ("lan", 1, 2, 1, 10), ("wan", 2, 4, 1, 30), ("lan", 0, 2, 1, 5),
]  # fmt: skip
FACTORS = (1, 1.2, 1.35, 1.39, 1.4, 1.41, 1.45, 1.49, 1.5, 1.51, 1.6, *range(2, 16), 20, 25, 31, 40, 50)
COPIES = (0.1, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 50)


@pytest.mark.parametrize(("network", "delay", "fragments", "slower", "copy"), CASES)
def test_a_slow_island_contributes_and_brakes_nobody(network, delay, fragments, slower, copy):
    run(network, delay, fragments, slower, copy)


@pytest.mark.soak
@pytest.mark.parametrize("network", NETWORKS)
def test_no_slow_island_is_left_out_or_brakes_the_others(network):
    kinds = [*((factor, 0) for factor in FACTORS), *((1, steps) for steps in COPIES)]
    for delay, fragments, kind in product((0, 1, 2), (1, 2, 3, 5, 8), kinds):
        run(network, delay, fragments, *kind)


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
    world = Observed([seconds] * FAST + [seconds * slower], timing, schedule, Member, steps)
    found = world.after(3 * steps * seconds + 60)
    assert [each.left for each in found] == [[0.0] * schedule.fragments] * len(found)
    assert {len(each.steps) for each in found[:FAST]} == {steps}
    assert {len(each.rounds) for each in found} == {schedule.rounds(steps - 1) + schedule.fragments}


def waits_longer(self, original=Member._grace):
    """Waits in the first round, too, for one and a half of its own steps."""
    return original(self) if self._fastest else GRACE_STEPS * self.handover.step_seconds


def waits_for_its_copy(self, original=Member._grace):
    """Waits for the copy of its own message, however long that takes."""
    return original(self) + 2 * self.handover.copy_seconds


def forgets(self, *arguments, original=Member._commit):
    """Drops a message that a round has not used."""
    original(self, *arguments)
    self.handover.state_replaced()


# Hands messages over only when rounds are due.
NEVER_EARLY = {"_is_slow": lambda self: False}


@pytest.mark.parametrize(
    ("planted", "case"),
    [
        (NEVER_EARLY, ("lan", 1, 2, 20, 0)),
        (NEVER_EARLY, ("lan", 1, 2, 1, 10)),
        (NEVER_EARLY | {"_grace": lambda self: 2 * self.handover.step_seconds}, ("lan", 1, 2, 8, 0)),
        ({"_grace": waits_for_its_copy}, ("wan", 1, 2, 1, 3.3)),
        ({"_commit": forgets}, ("wan", 1, 2, 10, 0)),
        ({"_grace": waits_longer}, ("wan", 1, 1, 5, 0)),
        ({"_on_early_message": lambda self, event: None}, ("wan", 1, 1, 50, 0)),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch, planted, case):
    for name, method in planted.items():
        monkeypatch.setattr(Member, name, method)
    with pytest.raises(BrokenError):
        run(*case)
