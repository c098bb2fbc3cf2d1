"""When islands write their checkpoints."""

import pytest

from gregale.methods.schedule import Schedule
from gregale.programs.island.loop import CheckpointStagger

SCHEDULE = Schedule(period=10, fragments=2, delay=1, layers=4)  # a round every 5 steps


def saved(turns: CheckpointStagger, place: float, rounds: range) -> list[int]:
    """The steps of the schedule after which a checkpoint is written; every round is asked about at three steps."""
    asked = [number for number in rounds for _ in range(3)]
    return [SCHEDULE.round_step(number) for number in asked if turns.is_due(number, place)]


@pytest.mark.parametrize(("place", "steps"), [(0.0, [40, 80, 120]), (0.25, [10, 50, 90]), (0.5, [20, 60, 100])])
def test_each_island_at_its_place(place, steps):
    assert saved(CheckpointStagger(40, SCHEDULE), place, range(24)) == steps


def test_after_a_restart_it_goes_on_with_the_next_turn():
    assert saved(CheckpointStagger(40, SCHEDULE), 0.5, range(12, 20)) == [100]  # after step 65


def test_a_round_that_was_missed_makes_the_turn_late_and_is_not_made_up_for_twice():
    turns = CheckpointStagger(40, SCHEDULE)
    assert saved(turns, 0.0, range(3)) == []
    assert saved(turns, 0.0, range(9, 20)) == [50, 80]


def test_one_whose_place_moves_waits_for_its_new_turn_and_saves_once_in_it():
    turns = CheckpointStagger(40, SCHEDULE)
    assert saved(turns, 0.0, range(9)) == [40]
    assert saved(turns, 0.75, range(9, 24)) == [110]


@pytest.mark.parametrize(("every", "arrived"), [(None, 7), (40, None)])
def test_never(every, arrived):
    assert not CheckpointStagger(every, SCHEDULE).is_due(arrived, 0.0)
