"""Where an island is between two of its messages: what was asked of it, what is under way, what has arrived."""

from __future__ import annotations

import time
from collections import deque

from gregale.islands.orders import Arrive, Pace, Restart, Take
from gregale.islands.patience import Patience
from gregale.islands.protocol.headers import NO_ROUND


class Turn:
    """One island's way from round to round, as its trainer sees it. Rounds are counted as committed ones.

    - `pace`: when rounds are due and what is waited for
    """

    def __init__(self, pace: Pace):
        self._pace = pace
        self._arrivals: deque[Arrive | Restart] = deque()
        self._wanted: int | None = None  # the round whose message the protocol asks for
        self._flying: int | None = None  # the round whose message was handed over and is not decided
        self._told_due: int | None = None  # the round that was said to be due
        self._since = 0  # steps since the last message
        self._begun: float | None = None  # when the round under way was said to be due, or had its message
        self._patience = Patience(pace.patience_seconds)
        self._steps, self._stepped_at = 0, time.monotonic()  # since the time of a step was last told

    def stepped(self) -> None:
        """A step was made."""
        self._since += 1
        self._steps += 1

    def step_seconds(self) -> float:
        """What a step has taken since this was last asked, as far as the trainer has handed them over."""
        now, steps = time.monotonic(), self._steps
        took = (now - self._stepped_at) / steps if steps else 0.0
        self._steps, self._stepped_at = 0, now
        return took

    def wants(self, number: int) -> None:
        """The protocol asks for the message of a round."""
        self._wanted, self._flying = number, None

    def departed(self, number: int, now: int) -> None:
        """The message of a round was handed over, while round `now` was under way: perhaps decided without it."""
        self._since = 0
        if number == now:
            self._wanted, self._flying = None, number
            self._begin()

    def decided(self, arrival: Arrive | Restart) -> None:
        """A round is committed, or a peer's state is installed, before which nothing is to arrive any more."""
        self._wanted = self._flying = self._told_due = None
        begun, self._begun = self._begun, None
        if isinstance(arrival, Restart):
            self._arrivals.clear()
        elif begun is not None:
            self._patience.learn(time.monotonic() - begun)
        self._arrivals.append(arrival)

    def arrival(self, leaving: bool) -> Arrive | Restart | None:
        """What the trainer is to mix in now, if anything; `leaving`: it makes no more steps, so nothing is early."""
        if not self._arrivals:
            return None
        early = isinstance(self._arrivals[0], Arrive) and self._since < self._pace.schedule.delay
        return None if early and not leaving else self._arrivals.popleft()

    def all_arrived(self) -> bool:
        """Whether every committed round is in the parameters."""
        return not self._arrivals

    def message(self, leaving: bool = False) -> Take | None:
        """The message that is asked for and has not been handed over; in lock step once all its steps are made.

        Not before the committed rounds have been mixed in: it would tell their tokens and their progress again.

        - `leaving`: no more are
        """
        if self._wanted is None or self._flying is not None or self._arrivals:
            return None
        early = self._pace.lockstep and self._since < self._pace.interval(self._wanted)
        return None if early and not leaving else Take(self._wanted)

    def is_due(self, number: int) -> bool:
        """Whether the island has made its steps for a round, and has not said so yet; it has then said so."""
        due = (
            number != NO_ROUND
            and self._told_due != number
            and self._flying is None
            and not self._arrivals
            and self._since >= self._pace.interval(number)
        )
        if due:
            self._told_due = number
            self._begin()
        return due

    def _begin(self) -> None:
        self._begun = time.monotonic() if self._begun is None else self._begun

    def must_wait(self, number: int) -> bool:
        """Whether no step may be made while round `number` is the next to be decided."""
        if number == NO_ROUND:
            return True
        if self._flying is None and self._told_due != number:
            return False
        if self._pace.waits:
            return self._flying is None or self._since >= self._pace.schedule.delay
        # The next message is due, and this one has not been decided: the network is slower than H steps, or somebody
        # is missing. Then, and where there are no decisions at all (no coordinator, too few islands), the island trains
        # on, as far as its lease goes.
        late = self._since >= self._pace.interval(number + 1)
        return late and self._begun is not None and time.monotonic() - self._begun < self._patience.seconds
