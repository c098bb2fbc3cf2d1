"""What an island's trainer is told to do between two steps, when its rounds are due, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gregale.methods.schedule import Schedule


class Down(NamedTuple):
    """What has come down to this host of a round's message."""

    messages: Any  # of this host's shards
    weight: float  # tokens
    norm: float | None  # root mean square of the whole; None: it is not finite


class SendMessage(NamedTuple):
    """Order: hand over the message of a round (`Driver.departed`)."""

    round: int

    def to_wire(self) -> list[Any]:
        """What other hosts are told of it."""
        return [self.round]


class ApplyRound(NamedTuple):
    """Order: mix a round's fragment in, as it is in host memory now.

    - `weight`: what this island contributed; with 0 it keeps its own
    - `place`: from 0 to 1, where in a period of checkpoints it is its turn to write one
    """

    round: int
    weight: float
    place: float = 0.0

    def to_wire(self) -> list[Any]:
        return [self.round, self.weight, self.place]


class LoadOuterState(NamedTuple):
    """Order: the whole outer state is a peer's; take all of it for the island's parameters.

    `inherits`: and with it a peer's inner optimizer (`Driver.inherited`), for an island that has begun with none
    """

    round: int
    inherits: bool = False

    def to_wire(self) -> list[Any]:
        return [self.round, self.inherits]


class CopyInnerState(NamedTuple):
    """Order: hand over a copy of the inner optimizer, for an island that joins (`Driver.shown`)."""

    def to_wire(self) -> list[Any]:
        return []


class Finish(NamedTuple):
    """Order: the last round has arrived, or the island has left the fleet; `complete`: the former."""

    complete: bool

    def to_wire(self) -> list[Any]:
        return [self.complete]


TrainerCommand = SendMessage | ApplyRound | LoadOuterState | CopyInnerState | Finish
_KINDS: dict[str, type[TrainerCommand]] = {
    kind.__name__: kind for kind in (SendMessage, ApplyRound, LoadOuterState, CopyInnerState, Finish)
}


def order_of(told: list[Any] | None) -> TrainerCommand | None:
    """The order that another host was told of: its name, and `told()`; None: take a step."""
    return None if told is None else _KINDS[told[0]](*told[1:])


@dataclass
class RoundPacing:
    """When an island's rounds are due and what it waits for.

    - `schedule`: H, P, tau
    - `rounds`: of the whole run
    - `lockstep`: every island makes exactly the same steps between rounds
    - `patience_seconds`: for so long at most an island waits for a round that is late; then it trains on
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
class WaitTimers:
    """Where the time went."""

    waiting: float = 0.0
    healing: float = 0.0
