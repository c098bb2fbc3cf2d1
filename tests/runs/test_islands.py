"""What the configuration of islands takes and what it refuses."""

import pytest

from gregale.errors import KeyedError
from gregale.islands.protocol.settings import heal_seconds, timing_of
from gregale.runs.islands import IslandsConfig


def test_seconds_are_those_of_the_network_but_what_is_given():
    lan, wan = timing_of(IslandsConfig()), timing_of(IslandsConfig(network="wan", reduce_seconds=7.0))
    assert (lan.heartbeat_seconds, wan.heartbeat_seconds) == (2.0, 10.0)
    assert (wan.reduce_seconds, wan.grace_seconds) == (7.0, None)
    assert heal_seconds(IslandsConfig()) < heal_seconds(IslandsConfig(network="wan"))


def test_names_and_addresses_are_checked():
    for name in ("", "a b", "-a", "x" * 65, "a/b"):
        with pytest.raises(KeyedError, match="name"):
            IslandsConfig(name=name)
    with pytest.raises(KeyedError, match="HOST:PORT"):
        IslandsConfig(lighthouse="oslo")
    assert IslandsConfig(lighthouse="oslo:29510").lighthouse == "oslo:29510"
    for bind in ("10.8.0.2:70000", "10.8.0.2:port", "fd00::1", ":29511", "0.0.0.0", "oslo:"):
        with pytest.raises(KeyedError, match="HOST or HOST:PORT"):
            IslandsConfig(bind=bind)
    assert all(IslandsConfig(bind=bind).bind == bind for bind in ("10.8.0.2", "10.8.0.2:29511", "oslo"))
