"""Time limits of islands by their network."""

from gregale.programs.island.timing import heal_seconds, timing_of
from gregale.runs.islands import IslandsConfig


def test_seconds_are_those_of_the_network_but_what_is_given():
    lan, wan = timing_of(IslandsConfig()), timing_of(IslandsConfig(network="wan", reduce_seconds=7.0))
    assert (lan.heartbeat_seconds, wan.heartbeat_seconds) == (2.0, 10.0)
    assert (wan.reduce_seconds, wan.grace_seconds) == (7.0, None)
    assert heal_seconds(IslandsConfig()) < heal_seconds(IslandsConfig(network="wan"))
