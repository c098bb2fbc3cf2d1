"""The decisions of an island's trainer between two steps: hand a message over, mix a round in, wait, or take a step;
and the state of that message (`Handover`).

An island whose steps are much longer than those of the fastest one (`Handover.early`) is in the middle of a step when a
round falls due. So it hands its message over at its last step boundary before that, as earlier rounds let it expect. Of
several rounds that fall due within its next step it takes the one whose fragment it contributed to least recently. An
island whose messages take longer to its host than those of the others does so too, for a round that such a message
reaches; it does not replace one that reaches a round before.

The driver and the simulator use this module. It has no clock: callers pass the time.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from gregale.islands.protocol.messages import NO_ROUND, EarlyMessage, MessageReady, RoundDue
from gregale.islands.trainer_command import ApplyRound, Arrival, LoadOuterState, RoundPacing, SendMessage

TIMED_ROUNDS, TIMED_STEPS = 15, 5  # in the medians; as many copies as steps
LATE = 2.0  # times the median
LATE_ROUNDS = 2  # intervals after the last due round, after which a slow island announces one
EARLY = 1.25  # steps within which a round must be expected for a message before it is due
STALE = 2  # steps for each fragment, without a contribution
REDUCES = 4  # the longest wait for a round, in units of the limit of one reduce


class Handover:
    """An island has one message at a time, of one fragment; the newest replaces the one before.

    `member.Member` requests and reads the message; `TrainerSide` hands it over.

    - `due`: the current round is due
    - `own`: this island has made its steps for the round, and announces to its peers that the round is due
    - `old`: the island has made another round of steps since the handover, so a new message contains more
    - `starved`: the trainer makes no steps, because no data is leased to it
    - `early`: this island's steps or copies are too long for the others to wait for one, so it hands messages over
      before rounds are due
    - `grace_seconds`: for which the others wait, once a round is due
    - `wanted`: the number of the round whose message the trainer must hand over at its next step boundary
    - `number`: the number of the round for which the newest message was made; None: it is used up, or obsolete
    - `snapshot`: the message, once it is available on the host
    - `count`: the number of the newest message, in all rounds; another number once that message is obsolete
    - `steps`: of this island since the last round that was due
    - `step_seconds`, `copy_seconds`: medians of recent steps, and from a handover until the message is on the host
    - `fragments`: a message of one round serves every later round a multiple of these later
    """

    def __init__(self) -> None:
        self.count, self.steps, self.fragments = 0, 0, 1
        self.starved = self.early = False
        self.step_seconds = self.copy_seconds = self.grace_seconds = 0.0
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
        if self._due_at is not None:
            self._between.append(now - self._due_at)
        self.due, self._due_at, self.steps = True, now, 0

    def due_in(self, rounds: int) -> float | None:
        """Return the time at which so many rounds will have been due since the last one that was; None: unknown."""
        return None if self._due_at is None or not self._between else self._due_at + rounds * self.interval_seconds

    @property
    def interval_seconds(self) -> float:
        """The usual seconds from due round to due round; infinite before the second one."""
        return median(self._between) if self._between else math.inf

    def missed(self, now: float) -> int:
        """Return how many of the next rounds a message misses that is handed over now."""
        lacking = now + self.copy_seconds - self.grace_seconds - max(self.due_in(1) or 0.0, now)
        return max(0, math.ceil(lacking / self.interval_seconds)) if lacking > 0 else 0

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
        self._stepped_at, self._waited = now, 0.0
        self._step_seconds, self._copy_seconds = (deque[float](maxlen=TIMED_STEPS) for _ in range(2))
        self._made = 0  # steps of this process
        self._contributed: dict[int, int] = {}  # `_made` when this island last contributed, by fragment

    def stepped(self, now: float, waited: float) -> None:
        """Count a step that was dispatched; those before are at most one step from their end.

        - `waited`: the seconds for which the trainer has waited for rounds and data so far
        """
        self._since += 1
        self._made += 1
        self._handover.steps += 1
        self._step_seconds.append(max(now - self._stepped_at - (waited - self._waited), 0.0))
        self._stepped_at, self._waited = now, waited
        self._handover.step_seconds = median(self._step_seconds)

    def copied(self, seconds: float) -> None:
        """Note how long a message took to the host, also one that is obsolete by now."""
        self._copy_seconds.append(seconds)
        self._handover.copy_seconds = median(self._copy_seconds)

    @property
    def undecided_steps(self) -> int:
        """The number of steps that no round in the parameters includes; a checkpoint saves it for the restart."""
        return self._before + self._since

    def progress(self, number: int) -> tuple[int, int]:
        """Return the number of steps made towards round `number`, and the number after which it is due."""
        return self._since, self._pace.interval(number)

    def message_sent(self, number: int, now: float) -> int:
        """Record the handover of the message of round `number`.

        Returns the message's number; `Handover.count` differs from it once the message is obsolete. It is obsolete at
        once if the round was decided, or the state replaced, after the trainer got the command.
        """
        self._before, self._since = self.undecided_steps, 0
        if number != self._handover.wanted or self._arrivals:
            return -1
        self._begin(now)
        return self._handover.depart(number)

    def round_decided(self, arrival: Arrival, now: float) -> None:
        """Queue a committed round, or an outer state that replaces the parameters and all queued rounds."""
        begun, self._begun = self._begun, None
        if isinstance(arrival, LoadOuterState):
            # The state that an arrival in the queue leads to has other steps of this island, or none.
            keeps = arrival.keeps and all(_keeps_steps(each) for each in self._arrivals)
            inherits = arrival.inherits or any(isinstance(e, LoadOuterState) and e.inherits for e in self._arrivals)
            arrival = arrival._replace(keeps=keeps, inherits=inherits)
            self._arrivals.clear()
        elif begun is not None:
            self._round_seconds.append(now - begun)
        self._arrivals.append(arrival)

    def arrival(self, is_last: bool) -> Arrival | None:
        """Return the round or state to mix in now, if any; `is_last`: no step comes before, so nothing is early."""
        if not self._arrivals:
            return None
        first = self._arrivals[0]
        contributed = isinstance(first, ApplyRound) and first.weight > 0
        if contributed and not (is_last or self._handover.early) and self._since < self._delay(first.round):
            return None
        found, self._before = self._arrivals.popleft(), 0
        if isinstance(found, LoadOuterState):
            self._since = self._since if found.keeps else 0
        elif contributed:
            self._contributed[self._pace.schedule.round_fragment(found.round)] = self._made
        return found

    def _delay(self, number: int) -> int:
        """Return the number of steps from a message to its arrival: tau, but all arrive before a closing round."""
        delay, after = self._pace.schedule.delay, number + 1
        return min(delay, self._pace.interval(after)) if after >= self._pace.closing else delay

    def all_arrived(self) -> bool:
        return not self._arrivals

    def message(
        self, number: int, now: float, post: Callable[[RoundDue | EarlyMessage], None], is_last: bool, starved: bool
    ) -> SendMessage | None:
        """Return the command for a message, if one is requested; in lockstep after all its steps.

        It waits until the committed rounds are mixed in: an earlier message would repeat their tokens and progress.

        - `number`: of the next round
        - `post`: passes an event to the member, which may request a message
        - `is_last`: there are no more steps, or none for now
        - `starved`: the cause is that no data is leased to this island
        """
        self._handover.starved = starved
        if (message := self._message(number, is_last)) is not None:
            return message
        if (early := self._early(number, now)) is not None:
            post(EarlyMessage(early))
        elif self._is_due(number, starved, now):
            self._begin(now)
            post(RoundDue())
        return self._message(number, is_last)

    def _message(self, number: int, is_last: bool) -> SendMessage | None:
        if (wanted := self._handover.wanted) is None or self._arrivals:
            return None
        early = self._pace.lockstep and self._since < self._pace.interval(number)
        return None if early and not is_last else SendMessage(wanted)

    def _is_due(self, number: int, starved: bool, now: float) -> bool:
        """Return whether the island has made its steps for a round, and has not announced it yet.

        An island that has handed over a message announces again after as many steps, and tau: its message is then old.
        While it waits for the round it makes none, and it does not wait for a message that contributes nothing.
        """
        handover = self._handover
        if number == NO_ROUND or handover.announced or self._arrivals:
            return False
        needed = self._pace.interval(number)
        if handover.due and handover.sent and not handover.weighs_nothing:
            is_old = self._since >= needed + self._pace.schedule.delay
            return is_old and handover.snapshot is not None and not self._pace.waits
        made = self._since - (needed == 0) if handover.due else self.undecided_steps  # another message has other steps
        if handover.early:  # its message is of steps before the last round too
            made = min(made, handover.steps)
        # A message that a round has left out brings no next round: alone, an island without data would wait for ever.
        left_out = not (handover.due or handover.early)
        is_idle = starved and (made > 0 or not handover.sent or left_out)
        return made >= needed or is_idle or self._is_overdue(now)

    def _is_overdue(self, now: float) -> bool:
        """Return whether the others, which are faster, announce no round any more, or not to this island."""
        handover = self._handover
        expected = handover.due_in(LATE_ROUNDS)
        return handover.early and not handover.due and expected is not None and now >= expected

    def _early(self, number: int, now: float) -> int | None:
        """Return the round for which the island hands a message over before it is due, if there is one."""
        handover, schedule = self._handover, self._pace.schedule
        if not handover.early or self._arrivals or not self._since or number == NO_ROUND:
            return None
        if self._pace.waits and handover.sent:
            return None
        coming = number + handover.due
        first = coming + handover.missed(now)
        if handover.number is not None:
            reached = max(handover.number, coming + (handover.number - coming) % schedule.fragments)
            if reached < first:
                return None
        expected = {each: handover.due_in(each - coming + 1) for each in range(first, first + schedule.fragments)}
        seconds = {each: at - handover.copy_seconds - now for each, at in expected.items() if at is not None}
        seconds = {each: left for each, left in seconds.items() if each < self._pace.closing}
        within = [each for each, left in seconds.items() if left <= handover.step_seconds]
        if not within and (nearest := min(seconds, default=None)) is not None:
            within = [nearest] if seconds[nearest] <= EARLY * handover.step_seconds else []
        if not within:
            return None
        contributed = {each: self._contributed.get(schedule.round_fragment(each), 0) for each in within}
        oldest = min(within, key=contributed.__getitem__)
        # Where the island waits for the round, it takes the nearest one, as long as that leaves no fragment behind.
        is_fresh = self._made - contributed[oldest] < STALE * schedule.fragments
        return within[0] if self._pace.waits and is_fresh else oldest

    def _begin(self, now: float) -> None:
        """Record the time of the round's announcement or message."""
        self._begun = now if self._begun is None else self._begun

    def must_wait(self, number: int, now: float) -> bool:
        """Return whether no step may be made while round `number` is the next to be decided."""
        handover = self._handover
        if number == NO_ROUND:
            return True
        # A round does not depend on a message that contributes nothing, and may never come if no island trains.
        is_early = handover.early and handover.due_in(1) is not None
        is_sent = handover.sent and (handover.due or is_early)
        if handover.weighs_nothing or not (is_sent or handover.own):
            return False
        if number >= self._pace.closing:
            return handover.due
        if self._pace.waits:
            return not is_sent or self._since >= self._delay(number)
        if handover.early:
            return False
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


def _keeps_steps(arrival: Arrival) -> bool:
    """Return whether an arrival leaves all of the island's steps in its parameters."""
    return arrival.keeps if isinstance(arrival, LoadOuterState) else arrival.weight == 0
