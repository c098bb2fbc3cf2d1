"""What `gregale island` makes sure of before it joins a fleet, and its status."""

from dataclasses import replace
from pathlib import Path

import pytest

from gregale.distributed.agreement import canonical
from gregale.errors import UserError
from gregale.islands.protocol.messages import seed
from gregale.islands.run import check_prolonged, check_restored
from gregale.islands.steps import StatusTracker
from gregale.methods.schedule import Schedule


def test_what_was_saved_has_to_be_of_one_round_on_all_hosts():
    """Each file has its hash, but host 0's and host 1's may be of two lines of the fleet."""
    record = replace(seed("of all hosts"), round=4)
    assert check_restored(record, "of all hosts", Path("outer")) is record
    with pytest.raises(UserError, match=r"outer .* are not those of round 4: .* --fresh"):
        check_restored(record, "of two rounds", Path("outer"))


def test_a_complete_fleet_is_not_continued_without_a_step():
    schedule, rounds = Schedule(12, 4, 0, 4), 17  # of 40 steps, the last four after them
    with pytest.raises(UserError, match=r"steps is 51: the fleet has made 17 rounds, .* Give at least 52 steps"):
        check_prolonged(schedule, 51, rounds)
    check_prolonged(schedule, 52, rounds)


def test_a_diverged_island_answers_its_peers():
    """They take an island that does not answer for one that is cut off."""
    status = StatusTracker("a", steps=9, step=2)
    status.on_step(3, {"loss": float("nan"), "tokens_per_second": 5.0})
    assert b'"step":3' in canonical(status.status())
    assert "loss" not in status.status()
