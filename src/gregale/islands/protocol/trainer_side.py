"""What an island's trainer does between two steps: hand a message over, mix a round in, wait, or go on.

The driver asks it, and so does the simulator. It has no clock: whoever calls it says what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gregale.islands.protocol.handover import Handover
from gregale.islands.protocol.headers import NO_ROUND
from gregale.islands.round_timeout import RoundTimeout
from gregale.islands.trainer_command import ApplyRound, LoadOuterState, RoundPacing, SendMessage


class TrainerSide:
    """One island's way from round to round, as its trainer sees it. Rounds are counted as committed ones.

    - `pace`: when rounds are due and what is waited for
    - `handover`: the member's record of the message of the round under way
    - `steps`: `undecided_steps` of a checkpoint
    """

    def __init__(self, pace: RoundPacing, handover: Handover, now: float = 0.0, steps: int = 0):
        self._pace, self._handover = pace, handover
        self._arrivals: deque[ApplyRound | LoadOuterState] = deque()
        self._since = steps  # since the last message, or since the state was replaced
        self._before = 0  # steps of the message that is under way
        self._begun: float | None = None  # when the round under way was said to be due, or had its message
        self._patience = RoundTimeout(pace.patience_seconds)
        self._steps, self._stepped_at = 0, now  # since the time of a step was last told

    def stepped(self) -> None:
        """A step was made."""
        self._since += 1
        self._steps += 1

    def step_seconds(self, now: float) -> float:
        """What a step has taken since this was last asked, as far as the trainer has handed them over."""
        took = (now - self._stepped_at) / self._steps if self._steps else 0.0
        self._steps, self._stepped_at = 0, now
        return took

    @property
    def undecided_steps(self) -> int:
        """Steps that no round in the parameters has in it: a checkpoint has them, so that a restart changes nothing."""
        return self._before + self._since

    def progress(self, number: int) -> tuple[int, int]:
        """Steps made towards round `number`, and steps after which it is due."""
        return self._since, self._pace.interval(number)

    def message_sent(self, number: int, current: int, now: float) -> int:
        """The message of a round was handed over, while round `current` was under way: perhaps decided without it.

        Returns the message's number; `Handover.count` is another one once it is of no use any more.
        """
        self._before, self._since = self.undecided_steps, 0
        if number != current:
            return 0
        self._begin(now)
        return self._handover.depart()

    def round_decided(self, arrival: ApplyRound | LoadOuterState, now: float) -> None:
        """A round is committed, or the outer state has to replace the parameters: nothing before it is to arrive."""
        begun, self._begun = self._begun, None
        if isinstance(arrival, LoadOuterState):
            self._arrivals.clear()
        elif begun is not None:
            self._patience.learn(now - begun)
        self._arrivals.append(arrival)

    def arrival(self, is_last: bool) -> ApplyRound | LoadOuterState | None:
        """What the trainer is to mix in now, if anything; `is_last`: it makes no step before, so nothing is early."""
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
        """Whether every committed round is in the parameters."""
        return not self._arrivals

    def message(
        self, number: int, now: float, say_due: Callable[[], None], is_last: bool, starved: bool
    ) -> SendMessage | None:
        """The message of round `number`, if it is asked for; in lock step once all its steps are made.

        Not before the committed rounds have been mixed in: it would tell their tokens and their progress again.

        - `say_due`: tells the member `Due`, which may ask for the message
        - `is_last`: there are no more steps, or none for now
        - `starved`: because no data is leased to this island
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
        """Whether the island has made its steps for a round, and has not said so yet.

        One that has handed over a message says so again after as many steps, and tau: its message is old then. While it
        waits for the round it makes none, and a message that contributes nothing is not waited for.
        """
        handover = self._handover
        if number == NO_ROUND or handover.said or self._arrivals:
            return False
        needed = self._pace.interval(number)
        if handover.sent and not handover.weighs_nothing:
            return not self._pace.waits and self._since >= needed + self._pace.schedule.delay
        return self._since >= needed or (starved and (self._since > 0 or not handover.sent))

    def _begin(self, now: float) -> None:
        """The round was said to be due, or had its message."""
        self._begun = now if self._begun is None else self._begun

    def must_wait(self, number: int, now: float) -> bool:
        """Whether no step may be made while round `number` is the next to be decided."""
        handover = self._handover
        if number == NO_ROUND:
            return True
        # A round does not depend on a message that contributes nothing, and may not come at all if nobody trains on.
        if handover.weighs_nothing or not (handover.sent or handover.own):
            return False
        if self._pace.waits:
            return not handover.sent or self._since >= self._pace.schedule.delay
        # The next message is due, and this one has not been decided: the network is slower than H steps, or somebody
        # is missing. Then, and where there are no decisions at all (no coordinator, too few islands), the island trains
        # on, as far as its lease goes.
        late = self._since >= self._pace.interval(number + 1)
        return late and self._begun is not None and now - self._begun < self._patience.seconds
