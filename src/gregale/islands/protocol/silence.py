"""Stall lines for one island: the first after three median rounds, each next after twice the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from gregale.islands.protocol.settings import Timing

ROUNDS = 15  # in the median
LATE = 3  # times the median
LEAST_SECONDS = 1.0  # shortest silence that is reported
AGAIN = 2  # factor between the times of two lines


class Silence:
    """The rounds of one island. Before its first, a round counts as late from when it is due, by `Timing`.

    - `line`: the last stall line, while no round is committed
    """

    def __init__(self, timing: Timing):
        self._first_round_seconds = timing.first_round_seconds
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._since: float | None = None  # the last round, or the time at which the first one was due
        self._next = 0.0  # seconds after which the next line is due
        self._has_rounds = False
        self.line: str | None = None

    @property
    def usual_seconds(self) -> float:
        """The median time from one round to the next."""
        return median(self._took) if self._took else self._first_round_seconds

    def _late_seconds(self) -> float:
        return max(LATE * self.usual_seconds, LEAST_SECONDS)

    def went_on(self, now: float, number: int, is_healed: bool = False) -> str | None:
        """Record a committed or fetched round; return a line if it ends a stall."""
        seconds = now - self._since if self._since is not None else 0.0
        if self._has_rounds and not is_healed:
            self._took.append(seconds)
        said, self.line = self.line, None
        self._has_rounds, self._since = True, now
        self._next = self._late_seconds()
        return f"Rounds go on: round {number} after {format_seconds(seconds)}." if said else None

    def look(self, now: float, is_due: bool, why: Callable[[], str]) -> str | None:
        """Return the stall line that is due now, if any.

        - `is_due`: whether a round is due, or the start of the fleet
        - `why`: returns the reason why no round is committed
        """
        if self._since is None:
            if is_due:
                self._since, self._next = now, self._late_seconds()
            return None
        seconds = now - self._since
        if seconds < self._next:
            return None
        self._next = AGAIN * seconds
        self.line = f"No round for {format_seconds(seconds)}: {why()}."
        return self.line


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
