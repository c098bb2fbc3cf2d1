"""The protocol's time limits, from the configuration."""

from dataclasses import replace

from gregale.islands.protocol.settings import LAN, WAN, Timing
from gregale.runs.islands import IslandsConfig

HEAL_SECONDS = {"lan": 120.0, "wan": 1800.0}
_KEYS = ("heartbeat_seconds", "grace_seconds", "reduce_seconds")


def timing_of(config: IslandsConfig) -> Timing:
    """Return the limits of the configured network, with the values that the user gave."""
    base = LAN if config.network == "lan" else WAN
    return replace(base, **{key: value for key in _KEYS if (value := getattr(config, key)) is not None})


def heal_seconds(config: IslandsConfig) -> float:
    """Return the limit of a joiner's transfer."""
    return config.heal_seconds or HEAL_SECONDS[config.network]
