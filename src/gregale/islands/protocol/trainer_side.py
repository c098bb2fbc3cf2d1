"""The decisions of an island's trainer between two steps: hand a message over, mix a round in, wait, or take a step.

The driver and the simulator use it. It has no clock: callers pass the time.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from gregale.islands.protocol.handover import Handover
from gregale.islands.protocol.headers import NO_ROUND
from gregale.islands.trainer_command import ApplyRound, Arrival, LoadOuterState, RoundPacing, SendMessage

TIMED_ROUNDS = 15  # in the median
LATE = 2.0  # times the median
REDUCES = 4  # the longest wait for a round, in units of the limit of one reduce


class TrainerSide:
    """One island's progress from round to round, as its trainer sees it. Rounds count committed rounds.

    - `pace`: when rounds are due, and when the trainer waits
    - `handover`: the member's record of the current round's message
    - `steps`: `undecided_steps` of a checkpoint
    """

    def __init__(self, pace: RoundPacing, handover: Handover, now: float = 0.0, steps: int = 0):
        self._pace, self._handover = pace, handover
        self._arrivals: deque[Arrival] = deque()
        self._since = steps  # steps since the last message, or since the state was replaced
        self._before = 0  # steps in the current message
        self._begun: float | None = None  # the time of the current round's announcement or message
        self._round_seconds: deque[float] = deque(maxlen=TIMED_ROUNDS)  # from announcements or messages to decisions
        self._steps, self._stepped_at = 0, now  # since the last measurement of the step time

    def stepped(self) -> None:
        self._since += 1
        self._steps += 1

    def step_seconds(self, now: float) -> float:
        """Return the mean time of the steps dispatched since the last call."""
        took = (now - self._stepped_at) / self._steps if self._steps else 0.0
        self._steps, self._stepped_at = 0, now
        return took

    @property
    def undecided_steps(self) -> int:
        """The number of steps that no round in the parameters includes; a checkpoint saves it for the restart."""
        return self._before + self._since

    def progress(self, number: int) -> tuple[int, int]:
        """Return the number of steps made towards round `number`, and the number after which it is due."""
        return self._since, self._pace.interval(number)

    def message_sent(self, number: int, current: int, now: float) -> int:
        """Record the handover of the message of round `number`, while round `current` is in progress.

        Returns the message's number; `Handover.count` differs from it once the message is obsolete. It is obsolete at
        once if the round was decided, or the state replaced, after the trainer got the command.
        """
        self._before, self._since = self.undecided_steps, 0
        if number != current or self._arrivals:
            return -1
        self._begin(now)
        return self._handover.depart()

    def round_decided(self, arrival: Arrival, now: float) -> None:
        """Queue a committed round, or an outer state that replaces the parameters and all queued rounds."""
        begun, self._begun = self._begun, None
        if isinstance(arrival, LoadOuterState):
            self._arrivals.clear()
        elif begun is not None:
            self._round_seconds.append(now - begun)
        self._arrivals.append(arrival)

    def arrival(self, is_last: bool) -> Arrival | None:
        """Return the round or state to mix in now, if any; `is_last`: no step comes before, so nothing is early."""
        if not self._arrivals:
            return None
        early = isinstance(self._arrivals[0], ApplyRound) and self._since < self._pace.schedule.delay
        if early and not is_last:
            return None
        found, self._before = self._arrivals.popleft(), 0
        if isinstance(found, LoadOuterState):
            self._since = 0
        return found

    def all_arrived(self) -> bool:
        """Return whether every committed round is in the parameters."""
        return not self._arrivals

    def message(
        self, number: int, now: float, say_due: Callable[[], None], is_last: bool, starved: bool
    ) -> SendMessage | None:
        """Return the command for the message of round `number`, if requested; in lockstep after all its steps.

        It waits until the committed rounds are mixed in: an earlier message would repeat their tokens and progress.

        - `say_due`: passes `RoundDue` to the member, which may request the message
        - `is_last`: there are no more steps, or none for now
        - `starved`: the cause is that no data is leased to this island
        """
        self._handover.starved = starved
        if (message := self._message(number, is_last)) is not None:
            return message
        if self._is_due(number, starved):
            self._begin(now)
            say_due()
        return self._message(number, is_last)

    def _message(self, number: int, is_last: bool) -> SendMessage | None:
        if not self._handover.wanted or self._arrivals:
            return None
        early = self._pace.lockstep and self._since < self._pace.interval(number)
        return None if early and not is_last else SendMessage(number)

    def _is_due(self, number: int, starved: bool) -> bool:
        """Return whether the island has made its steps for a round, and has not announced it yet.

        An island that has handed over a message announces again after as many steps, and tau: its message is then old.
        While it waits for the round it makes none, and it does not wait for a message that contributes nothing.
        """
        handover = self._handover
        if number == NO_ROUND or handover.announced or self._arrivals:
            return False
        needed = self._pace.interval(number)
        if handover.sent and not handover.weighs_nothing:
            return not self._pace.waits and self._since >= needed + self._pace.schedule.delay
        return self._since >= needed or (starved and (self._since > 0 or not handover.sent))

    def _begin(self, now: float) -> None:
        """Record the time of the round's announcement or message."""
        self._begun = now if self._begun is None else self._begun

    def must_wait(self, number: int, now: float) -> bool:
        """Return whether no step may be made while round `number` is the next to be decided."""
        handover = self._handover
        if number == NO_ROUND:
            return True
        # A round does not depend on a message that contributes nothing, and may never come if no island trains.
        if handover.weighs_nothing or not (handover.sent or handover.own):
            return False
        if self._pace.waits:
            return not handover.sent or self._since >= self._pace.schedule.delay
        # The next message is due, and this one has not been decided: the network is slower than H steps, or a member is
        # missing. After the timeout, also without any decisions (no coordinator, too few islands), the island trains
        # on, as far as its lease allows.
        late = self._since >= self._pace.interval(number + 1)
        return late and self._begun is not None and now - self._begun < self._timeout_seconds()

    def _timeout_seconds(self) -> float:
        """Return the time after which the island no longer waits for a round, from the duration of recent rounds.

        A network slower than H steps makes all rounds long, and the timeout grows with them. A round that takes much
        longer than the others has lost a member. Detecting that takes seconds, in which the island continues to train.
        """
        usual = median(self._round_seconds) if self._round_seconds else math.inf
        return min(self._pace.timeout_seconds, LATE * usual)
