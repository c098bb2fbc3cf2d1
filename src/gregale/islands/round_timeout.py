"""An adaptive timeout for rounds: a multiple of the median duration of recent rounds.

A network slower than H steps makes all rounds long, and the timeout grows with them. A round that takes much longer
than the others has lost a member. Detecting that takes seconds, in which the island continues to train.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ROUNDS = 15  # in the median
LATE = 2.0  # times the median
REDUCES = 4  # the longest timeout, in units of the limit of one reduce


class RoundTimeout:
    """The timeout of one island's rounds.

    - `max_seconds`: the upper limit, and the timeout until the first round is known
    """

    def __init__(self, max_seconds: float):
        self._max_seconds = max_seconds
        self._took: deque[float] = deque(maxlen=ROUNDS)

    def learn(self, seconds: float) -> None:
        """Record the time from this island's announcement or message to the decision of the round."""
        self._took.append(seconds)

    @property
    def seconds(self) -> float:
        """The time after which the island no longer waits for a round."""
        return min(self._max_seconds, LATE * median(self._took)) if self._took else self._max_seconds
