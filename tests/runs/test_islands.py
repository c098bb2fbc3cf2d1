"""What the configuration of islands takes and what it refuses."""

import pytest

from gregale.errors import KeyedError
from gregale.islands.protocol.settings import heal_seconds, timing_of
from gregale.runs.islands import IslandsConfig


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 65, "a/b"])
def test_names_that_are_none(name):
    with pytest.raises(KeyedError, match="name"):
        IslandsConfig(name=name)


def test_a_lighthouse_has_a_port():
    with pytest.raises(KeyedError, match="HOST:PORT"):
        IslandsConfig(lighthouse="oslo")
    assert IslandsConfig(lighthouse="oslo:29510").lighthouse == "oslo:29510"


def test_seconds_are_those_of_the_network_but_what_is_given():
    lan, wan = timing_of(IslandsConfig()), timing_of(IslandsConfig(network="wan", reduce_seconds=7.0))
    assert (lan.heartbeat_seconds, wan.heartbeat_seconds) == (2.0, 10.0)
    assert (wan.reduce_seconds, wan.grace_seconds) == (7.0, None)
    assert heal_seconds(IslandsConfig()) < heal_seconds(IslandsConfig(network="wan"))


@pytest.mark.parametrize("bind", ["10.8.0.2:70000", "10.8.0.2:port", "fd00::1", ":29511", "0.0.0.0", "oslo:"])
def test_an_address_that_islands_cannot_reach(bind):
    with pytest.raises(KeyedError, match="HOST or HOST:PORT"):
        IslandsConfig(bind=bind)


@pytest.mark.parametrize("bind", ["10.8.0.2", "10.8.0.2:29511", "oslo"])
def test_an_address_with_and_without_a_port(bind):
    assert IslandsConfig(bind=bind).bind == bind
