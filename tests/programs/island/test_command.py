"""What `gregale island` makes sure of before it joins a fleet, and its status."""

from dataclasses import replace
from pathlib import Path

import pytest

from gregale.distributed.signing import canonical
from gregale.errors import UserError
from gregale.islands.protocol.headers import seed
from gregale.programs.island.command import check_restored
from gregale.programs.island.status import StatusTracker


def test_what_was_saved_has_to_be_of_one_round_on_all_hosts():
    """Each file has its hash, but host 0's and host 1's may be of two lines of the fleet."""
    record = replace(seed("of all hosts"), round=4)
    assert check_restored(record, "of all hosts", Path("outer")) is record
    with pytest.raises(UserError, match=r"outer .* are not those of round 4: .* --fresh"):
        check_restored(record, "of two rounds", Path("outer"))


def test_a_diverged_island_answers_its_peers():
    """They take an island that does not answer for one that is cut off."""
    status = StatusTracker("a", steps=9, step=2)
    status.on_step(3, {"loss": float("nan"), "tokens_per_second": 5.0})
    assert b'"step":3' in canonical(status.status())
    assert "loss" not in status.status()
