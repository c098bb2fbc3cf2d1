"""Whether rounds have stopped, and what is said of it: a line after three usual rounds, and again ever more rarely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from gregale.islands.protocol.settings import Timing

ROUNDS = 15  # of which the usual time is the median
LATE = 3  # times the usual
LEAST_SECONDS = 1.0  # of silence before anything is said
AGAIN = 2  # the next line comes after so many times the seconds of the last one


class Silence:
    """Follows one island's rounds. Before its first, a round counts as late from when it is due, by `Timing`.

    - `line`: what was said last, while no round is committed
    """

    def __init__(self, timing: Timing):
        self._first_round_seconds = timing.first_round_seconds
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._since: float | None = None  # the last round, or the time at which the first one was due
        self._next = 0.0  # seconds after which something is said
        self._has_rounds = False
        self.line: str | None = None

    @property
    def usual_seconds(self) -> float:
        """From one round to the next."""
        return median(self._took) if self._took else self._first_round_seconds

    def _late_seconds(self) -> float:
        return max(LATE * self.usual_seconds, LEAST_SECONDS)

    def went_on(self, now: float, number: int, is_healed: bool = False) -> str | None:
        """A round was committed, or fetched from a peer; what is to be said of it after silence."""
        seconds = now - self._since if self._since is not None else 0.0
        if self._has_rounds and not is_healed:
            self._took.append(seconds)
        said, self.line = self.line, None
        self._has_rounds, self._since = True, now
        self._next = self._late_seconds()
        return f"Rounds go on: round {number} after {_shown(seconds)}." if said else None

    def look(self, now: float, is_due: bool, why: Callable[[], str]) -> str | None:
        """What is to be said now, if anything.

        - `is_due`: whether a round is, or the fleet's beginning
        - `why`: no round is committed, in a few words
        """
        if self._since is None:
            if is_due:
                self._since, self._next = now, self._late_seconds()
            return None
        seconds = now - self._since
        if seconds < self._next:
            return None
        self._next = AGAIN * seconds
        self.line = f"No round for {_shown(seconds)}: {why()}."
        return self.line


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
