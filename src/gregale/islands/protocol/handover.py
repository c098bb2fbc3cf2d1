"""The state of the message that an island is about to contribute: wanted, on its way, or available."""

import math
from collections import deque
from statistics import median

from gregale.islands.protocol.messages import MessageReady

TIMED_ROUNDS = 15  # in the median


class Handover:
    """An island has one message at a time, of one fragment; the newest replaces the one before.

    `member.Member` requests and reads the message; `trainer_side.TrainerSide` hands it over.

    - `due`: the current round is due
    - `own`: this island has made its steps for the round, and announces to its peers that the round is due
    - `old`: the island has made another round of steps since the handover, so a new message contains more
    - `starved`: the trainer makes no steps, because no data is leased to it
    - `early`: this island's steps are too long for the others to wait for one, so it hands messages over before rounds
      are due
    - `wanted`: the number of the round whose message the trainer must hand over at its next step boundary
    - `number`: the number of the round for which the newest message was made; None: it is used up, or obsolete
    - `snapshot`: the message, once it is available on the host
    - `count`: the number of the newest message, in all rounds; another number once that message is obsolete
    - `step_seconds`, `copy_seconds`: recent times of a step, and from a handover until the message is on the host
    - `fragments`: a message of one round serves every later round a multiple of these later
    """

    def __init__(self) -> None:
        self.count, self.fragments = 0, 1
        self.starved = self.early = False
        self.step_seconds = self.copy_seconds = 0.0
        self._due_at: float | None = None
        self._between: deque[float] = deque(maxlen=TIMED_ROUNDS)  # seconds from due round to due round
        self.state_replaced()

    def next_round(self, used: bool) -> None:
        """Begin the interval of the next round, in which nothing is due. A message that was not used stays.

        - `used`: the message is part of the decided round
        """
        self.due = self.own = self.old = False
        self.wanted: int | None = None
        if used or self.weighs_nothing:
            self.number, self.snapshot = None, None

    def state_replaced(self) -> None:
        """Make the message obsolete: it changes a state that this island no longer has."""
        self.number: int | None = None
        self.snapshot: MessageReady | None = None
        self.count += 1
        self.next_round(used=True)

    def fall_due(self, now: float) -> None:
        """Note that the current round is due."""
        if self._due_at is not None:
            self._between.append(now - self._due_at)
        self.due, self._due_at = True, now

    def due_in(self, rounds: int) -> float | None:
        """Return the time at which so many rounds will have been due since the last one that was; None: unknown."""
        return None if self._due_at is None or not self._between else self._due_at + rounds * self.interval_seconds

    @property
    def interval_seconds(self) -> float:
        """The usual seconds from due round to due round; infinite before the second one."""
        return median(self._between) if self._between else math.inf

    def serves(self, number: int) -> bool:
        """Return whether the newest message contributes to round `number`."""
        return self.number is not None and self.number <= number and (number - self.number) % self.fragments == 0

    def want(self, number: int) -> None:
        """Request a message for round `number`, replacing the one there is."""
        self.old, self.wanted, self.number, self.snapshot = False, number, None, None

    def depart(self, number: int) -> int:
        """Note that the trainer has handed over the message for round `number`; return the message's number."""
        self.count += 1
        self.old, self.wanted, self.number, self.snapshot = False, None, number, None
        return self.count

    def arrive(self, snapshot: MessageReady) -> None:
        """Note that the message is on the host."""
        self.wanted, self.number, self.snapshot = None, snapshot.round, snapshot

    @property
    def sent(self) -> bool:
        """Whether the trainer has handed a message over that is not used up."""
        return self.number is not None

    @property
    def weighs_nothing(self) -> bool:
        """Whether the available message contributes nothing, so that the round does not depend on it."""
        return self.snapshot is not None and self.snapshot.weight == 0

    @property
    def announced(self) -> bool:
        """Whether the trainer has announced its steps: those since its message, if it has sent one for this round."""
        return self.old if self.sent and self.due else self.own
