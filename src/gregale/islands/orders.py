"""What an island's trainer is told to do between two steps, when its rounds are due, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gregale.islands.inner import Inner
from gregale.methods.schedule import Schedule


class Take(NamedTuple):
    """Order: hand over the message of a round (`Driver.departed`)."""

    round: int


class Arrive(NamedTuple):
    """Order: mix a round's fragment in, as it is in host memory now.

    `weight`: what this island contributed; with 0 it keeps its own.
    """

    round: int
    weight: float


class Restart(NamedTuple):
    """Order: the whole outer state is a peer's; take all of it for the island's parameters.

    `inner`: a peer's inner optimizer, for an island that has begun with none
    """

    round: int
    inner: Inner | None = None


class Show(NamedTuple):
    """Order: hand over a copy of the inner optimizer, for an island that joins (`Driver.shown`)."""


class Finish(NamedTuple):
    """Order: the last round has arrived, or the island has left the fleet; `complete`: the former."""

    complete: bool


Order = Take | Arrive | Restart | Show | Finish


@dataclass
class Pace:
    """When an island's rounds are due and what it waits for.

    - `schedule`: H, P, tau
    - `rounds`: of the whole run
    - `lockstep`: every island makes exactly the same steps between rounds
    - `patience_seconds`: after the last round for so long an island waits for one that is late; then it trains on
    """

    schedule: Schedule
    rounds: int
    lockstep: bool
    patience_seconds: float

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for a round tau steps after its message."""
        return self.lockstep or self.schedule.delay == 0

    def interval(self, number: int) -> int:
        """Steps from the message of the round before to that of round `number`."""
        return self.schedule.round_step(number) - self.schedule.round_step(number - 1)


@dataclass
class Seconds:
    """Where the time went."""

    waiting: float = 0.0
    healing: float = 0.0
