"""The commands to an island's trainer between two steps, and the pacing of rounds."""

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from gregale.methods.schedule import Schedule


class DeviceToHostCopy(NamedTuple):
    """This host's share of a round's message, copied to the host."""

    messages: Any  # of this host's shards
    weight: float  # tokens
    norm: float | None  # root mean square of the whole message; None: it is not finite


class SendMessage(NamedTuple):
    """Command: hand over the message of a round (`Driver.message_sent`)."""

    round: int


class ApplyRound(NamedTuple):
    """Command: mix in a round's fragment, which is now in host memory."""

    round: int
    weight: float  # the contribution of this island; with 0 its steps stay, on the new state
    save_offset: float = 0.0  # the island's turn to save within a period of checkpoints, in [0, 1)


class LoadOuterState(NamedTuple):
    """Command: replace the island's parameters with the whole outer state, which a peer supplied.

    - `inherits`: also adopt a peer's inner optimizer (`Driver.inherited`), because the island has none of its own
    - `keeps`: the island's steps since it last contributed stay, on the new state
    """

    round: int
    inherits: bool = False
    keeps: bool = False


class CopyInnerState(NamedTuple):
    """Command: hand over a copy of the inner optimizer for a joining island (`Driver.shown`)."""


class Finish(NamedTuple):
    """Command: end; `complete`: the last round has arrived, otherwise the island has left the fleet."""

    complete: bool


Arrival = ApplyRound | LoadOuterState
TrainerCommand = SendMessage | ApplyRound | LoadOuterState | CopyInnerState | Finish
_KINDS: dict[str, type[TrainerCommand]] = {kind.__name__: kind for kind in get_args(TrainerCommand)}


def from_wire(wire: list[Any] | None) -> TrainerCommand | None:
    """Return the command that host 0 sent as its name and its fields; None: take a step."""
    return None if wire is None else _KINDS[wire[0]](*wire[1:])


@dataclass
class RoundPacing:
    """When an island's rounds are due, and when the trainer waits for them.

    The sends before the last step are rounds. After it comes a closing round of each fragment.
    """

    schedule: Schedule  # H, P, tau
    steps: int  # of the whole run
    lockstep: bool  # every island makes exactly the same steps between rounds
    timeout_seconds: float  # the longest wait for a late round; then the island continues to train

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for a round tau steps after its message."""
        return self.lockstep or self.schedule.delay == 0

    @property
    def closing(self) -> int:
        """The number of the first closing round."""
        return self.schedule.rounds(self.steps - 1)

    def interval(self, number: int) -> int:
        """Return the number of steps from the message of the previous round to that of round `number`."""
        return self.round_step(number) - self.round_step(number - 1)

    def round_step(self, number: int) -> int:
        """Return the number of steps after which round `number` is due; 0 for the round before the first."""
        return min(self.schedule.round_step(number), self.steps)
