"""The protocol's time limits, and the parameters of its decisions."""

import math
from dataclasses import dataclass, field, replace

from gregale.islands.config import IslandsConfig
from gregale.islands.protocol.ledger import LeasePolicy


@dataclass(frozen=True)
class Timing:
    """Seconds. The defaults are those of `LAN`."""

    heartbeat_seconds: float = 2.0  # silence after which an island is out of the fleet (the coordinator's rule)
    join_seconds: float = 2.0  # a part of `gather_seconds`, longer than a round trip
    reduce_seconds: float = 5.0  # the limit of one reduce
    grace_seconds: float | None = None  # a round's wait for a member's step; None: `GRACE_STEPS` of the fastest member
    max_grace_seconds: float = 10.0  # the limit of the learned grace
    ping_seconds: float = 0.2  # interval of the announcements to peers that a round is due
    retry_seconds: float = 0.2  # pause before an unsuccessful request is repeated
    turnover_seconds: float = 8.0  # wait of half of the fleet or less for the others, which may have continued alone
    leave_seconds: float = 20.0  # how long a leaver waits for its last round, and a closing round for a message
    hold_seconds: float = 2.0  # interval in which the coordinator confirms that it still holds a request
    network_seconds: float = 3.0  # the limit of a message to the coordinator and its reply

    @property
    def gather_seconds(self) -> float:
        """The coordinator's wait for other members, which may pause before they repeat their requests."""
        return self.join_seconds + self.retry_seconds

    @property
    def linger_seconds(self) -> float:
        """How long a complete island waits for another one to fetch its state."""
        return self.leave_seconds + self.turnover_seconds

    @property
    def ask_seconds(self) -> float:
        """The time after which a request without view or confirmation has failed."""
        return self.hold_seconds + self.network_seconds


LAN = Timing()
WAN = Timing(
    heartbeat_seconds=10.0,
    join_seconds=3.0,
    reduce_seconds=60.0,
    max_grace_seconds=60.0,
    ping_seconds=1.0,
    retry_seconds=1.0,
    turnover_seconds=40.0,
    leave_seconds=180.0,
)
HEAL_SECONDS = {"lan": 120.0, "wan": 1800.0}
_KEYS = ("heartbeat_seconds", "grace_seconds", "reduce_seconds")


def timing_of(config: IslandsConfig) -> Timing:
    """Return the limits of the configured network, with the values that the user gave."""
    base = LAN if config.network == "lan" else WAN
    return replace(base, **{key: value for key in _KEYS if (value := getattr(config, key)) is not None})


def heal_seconds(config: IslandsConfig) -> float:
    return config.heal_seconds or HEAL_SECONDS[config.network]


@dataclass(frozen=True)
class Rules:
    """The parameters that must agree, so that the same view leads to the same decision: part of the agreement."""

    minimum: int = 1  # the smallest number of members in a view that make a round
    lease_policy: LeasePolicy = field(default_factory=LeasePolicy)  # the size of data leases
    start: int = 1  # the smallest number of members with which a fleet begins, anew or from checkpoints
    lockstep: bool = False  # a round waits until all live members have their messages
    outlier: float = 10.0  # a message with a norm above this multiple of the expected norm contributes nothing
    stages: tuple[int, ...] = ()  # the number of rounds after which each stage but the first begins
    fragments: tuple[int, ...] = (1,)  # of each stage: a round changes one
    closing: float = math.inf  # from this round on no steps come between rounds, and each waits for all messages
    majority: bool = False  # there are several coordinators: only more than half of the voters continue

    @property
    def rounds(self) -> float:
        """The number of rounds of the whole run: a closing round of each fragment comes after the others."""
        return self.closing + self.fragments[-1]

    def fragments_at(self, round: int) -> int:
        """Return the number of fragments in the stage that the fleet is in after so many rounds."""
        return self.fragments[min(self.stage_at(round), len(self.fragments) - 1)]

    def stage_at(self, round: int) -> int:
        """Return the number of the stage, from 0, that the fleet is in after so many rounds."""
        return sum(first <= round for first in self.stages)
