"""Which settings the islands of a fleet must have in common."""

from types import SimpleNamespace
from typing import Any

import pytest

from gregale.distributed.agreement import difference, from_text
from gregale.programs.island.command import agreement
from gregale.runs.config import TrainConfig
from gregale.runs.islands import IslandsConfig

CORPUS: Any = SimpleNamespace(stores={}, tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d")


def settings(**islands: Any) -> dict[str, str]:
    setup: Any = SimpleNamespace(config=TrainConfig("tiny", 4, islands=IslandsConfig(**islands)))
    return dict(from_text(agreement(setup, CORPUS, ["shards"])))


@pytest.mark.parametrize(
    ("islands", "says"),
    [
        ({"heartbeat_seconds": 7.0}, "islands.heartbeat_seconds is 2.0 in the fleet, but 7.0 in this island"),
        ({"min_members_to_start": 3}, "islands.min_members_to_start is 1 in the fleet, but 3 in this island"),
        ({"network": "wan"}, "islands.network is lan in the fleet, but wan in this island"),
        ({"heartbeat_seconds": 2.0, "name": "oslo", "reduce_seconds": 9.0}, ""),
    ],
)
def test_an_island_with_other_seconds_than_the_fleet_differs(islands, says):
    text = difference({"the fleet": settings(), "this island": settings(**islands)})
    assert text.startswith(says)
    assert bool(says) == bool(text)
