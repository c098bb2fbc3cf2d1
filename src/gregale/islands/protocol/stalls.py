"""Stall lines for one island: the first after three median rounds, each next after twice the time."""

from collections import deque
from collections.abc import Callable
from statistics import median

from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import NO_ROUND, OuterRecord
from gregale.islands.protocol.news import COMPILES
from gregale.islands.protocol.trainer_side import TrainerSide

ROUNDS = 15  # in the median
LATE = 3  # times the median
LEAST_SECONDS = 1.0  # shortest silence that is reported
AGAIN = 2  # factor between the times of two lines
SETTLED = 2  # median rounds after a silence of the coordinator, in which a line would blame the islands for it


class Stalls:
    """The rounds of one member. Before its first, a round counts as late from when it is due, by `Timing`.

    - `compiles`: returns whether the trainer waits for the compiler
    - `line`, `reason`: the last stall line and the reason in it, while no round is committed

    Times are those of `RunningTime`.
    """

    def __init__(self, member: Member, trainer: TrainerSide, compiles: Callable[[], bool] = lambda: False):
        self._member, self._trainer, self._compiles = member, trainer, compiles
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._since: float | None = None  # the last round, or the time at which the first one was due
        self._next = 0.0  # seconds after which the next line is due
        self._has_rounds, self._stopped = False, 0.0
        self.line: str | None = None
        self.reason: str | None = None

    def _usual_seconds(self) -> float:
        timing = self._member.timing
        return median(self._took) if self._took else timing.join_seconds + timing.reduce_seconds

    def _late_seconds(self) -> float:
        return max(LATE * self._usual_seconds(), LEAST_SECONDS)

    def went_on(self, now: float, outer: OuterRecord, is_healed: bool = False) -> str | None:
        """Record a committed or fetched state; return a line if it ends a stall."""
        seconds = now - self._since if self._since is not None else 0.0
        if self._has_rounds and not is_healed:
            self._took.append(seconds)
        was_stalled, self.line, self.reason = self.line is not None, None, None
        self._has_rounds, self._since = True, now
        self._next = self._late_seconds()
        return f"Rounds go on: round {outer.round} after {format_seconds(seconds)}." if was_stalled else None

    def look(self, now: float, stopped: float = 0.0) -> str | None:
        """Return the stall line that is due now, if any.

        `stopped`: the seconds for which this process did not run so far. After a stop that the others have noticed, the
        wait for a round begins again: it is not their fault.
        """
        member = self._member
        gap, self._stopped = stopped - self._stopped, stopped
        if member.done or member.is_complete:
            return None
        if gap >= member.timing.heartbeat_seconds and self._since is not None:
            self._since, self._next = now, self._late_seconds()
            self.reason = "this process was stopped, or its machine was suspended"
            self.line = f"No round for {format_seconds(gap)}: {self.reason}."
            return self.line
        if self._since is None:
            if member.handover.due or member.outer.round == NO_ROUND:
                self._since, self._next = now, self._late_seconds()
            return None
        seconds = now - self._since
        if seconds < self._next:
            return None
        if not member.is_reason_known(self._since + self._next, SETTLED * self._usual_seconds()):
            return None
        self._next = AGAIN * seconds
        self.reason = self._why()
        self.line = f"No round for {format_seconds(seconds)}: {self.reason}."
        return self.line

    def _why(self) -> str:
        number, why = self._member.outer.round, self._member.stall_reason()
        if number == NO_ROUND:
            return why or "the fleet has not begun"
        if self._compiles():
            compiles = COMPILES if number in self._member.rules.stages else "this island compiles a program"
            return f"{compiles}; {why}" if why else compiles
        why = why or self._of_steps(number)
        return f"{why}; all data leased to this island is used" if self._member.handover.starved else why

    def _of_steps(self, number: int) -> str:
        handover = self._member.handover
        if handover.due and handover.wanted is not None:
            return f"this island is in the middle of a step (one takes {handover.step_seconds:.1f} s)"
        made, needed = self._trainer.progress(number)
        if needed == 0:
            return "this island has not handed over its message of a round after the last step"
        return f"this island has made {made} of the {needed} steps of a round"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
