"""How long the protocol waits for what, and the numbers that its decisions need."""

from dataclasses import dataclass, field

from gregale.islands.protocol.ledger import LeasePolicy


@dataclass(frozen=True)
class Timing:
    """Seconds. The defaults are those of `LAN`.

    heartbeat_seconds   an island that was not heard of for so long is out (the coordinator's rule)
    join_seconds        how long the coordinator waits for the others once somebody asks
    reduce_seconds      a reduce that took so long has failed
    grace_seconds       how long a round waits for a member's step to end; None: the longest step that members report
    most_grace_seconds  the learned grace is never longer, and this before any is learned
    ping_seconds        peers are told so often that a round is due
    retry_seconds       pause before an ask is repeated that led to nothing
    turnover_seconds    how long half of the fleet or less waits for the others, when these may have gone on alone
    leave_seconds       a leaver waits so long for its last round
    """

    heartbeat_seconds: float = 2.0
    join_seconds: float = 2.0
    reduce_seconds: float = 5.0
    grace_seconds: float | None = None
    most_grace_seconds: float = 10.0
    ping_seconds: float = 0.2
    retry_seconds: float = 0.2
    turnover_seconds: float = 8.0
    leave_seconds: float = 20.0

    @property
    def ask_seconds(self) -> float:
        """After which an ask is given up: twice the longest time that a coordinator takes to answer."""
        return 2 * (self.heartbeat_seconds + self.join_seconds)

    @property
    def first_round_seconds(self) -> float:
        """What a round is taken to need before there has been one, from when it is due."""
        return self.join_seconds + self.reduce_seconds


LAN = Timing()
WAN = Timing(
    heartbeat_seconds=10.0,
    join_seconds=3.0,
    reduce_seconds=60.0,
    most_grace_seconds=60.0,
    ping_seconds=1.0,
    retry_seconds=1.0,
    turnover_seconds=40.0,
    leave_seconds=180.0,
)


@dataclass(frozen=True)
class Rules:
    """What must be the same in all members for the same view to mean the same: part of the agreement.

    minimum   fewer members in a view: nothing is reduced, nobody goes on
    lot       how the data is leased
    start     a fleet does not begin with fewer, neither anew nor from checkpoints
    lockstep  a round waits until all that live have their snapshots
    outlier   a message whose norm is more than this times what is expected contributes nothing (`outliers`)
    """

    minimum: int = 1
    lot: LeasePolicy = field(default_factory=LeasePolicy)
    start: int = 1
    lockstep: bool = False
    outlier: float = 10.0
