"""How long a round is waited for that should have been decided: what rounds usually take, and as much again.

A network that is slower than H steps makes all rounds long, and is waited for. A round that takes far longer than the
others has lost somebody: to find that out takes seconds, in which an island trains on.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ROUNDS = 15  # of which the usual time is the median
LATE = 2.0  # times the usual
REDUCES = 4  # in units of the time that one reduce may take: the longest patience


class RoundTimeout:
    """Learns from the rounds of an island.

    - `most_seconds`: never longer; and until there has been a round
    """

    def __init__(self, most_seconds: float):
        self._most_seconds = most_seconds
        self._took: deque[float] = deque(maxlen=ROUNDS)

    def learn(self, seconds: float) -> None:
        """A round was decided so long after this island had said that it was due, or had handed over its message."""
        self._took.append(seconds)

    @property
    def seconds(self) -> float:
        """After which a round is not waited for any more."""
        return min(self._most_seconds, LATE * median(self._took)) if self._took else self._most_seconds
