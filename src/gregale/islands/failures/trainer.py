"""The inner steps of one modelled island, in closed form between the events that change their course."""

import math

SLACK = 1e-9  # of a step: times are sums of floats


class Trainer:
    """Steps follow each other from `begin` on, but none is taken beyond a `hold`.

    - `marks`: [fragment] the steps up to which this island has contributed to it
    - `waiting_seconds`: at holds, up to the newest release
    """

    def __init__(self, step_seconds: float, fragments: int):
        self.step_seconds = step_seconds
        self.marks = [0.0] * fragments
        self.waiting_seconds = 0.0
        self._done, self._since, self._limit = 0.0, math.inf, math.inf  # the step after `_done` began at `_since`

    @property
    def running(self) -> bool:
        """Whether it has begun."""
        return self._since < math.inf

    def begin(self, now: float) -> None:
        """There is a state to train on."""
        self._since = now

    def progress(self, now: float) -> float:
        """Steps done, with the part of the one that is under way."""
        if not self.running:
            return 0.0
        return min(self._limit, self._done + (now - self._since) / self.step_seconds)

    def steps(self, now: float) -> int:
        """Whole steps done."""
        return math.floor(self.progress(now) + SLACK)

    def time_of(self, steps: float, now: float) -> float:
        """When so many steps are done, `now` if they are; what holds it now does so no longer then."""
        return max(now, self._since + (steps - self._done) * self.step_seconds)

    def boundary(self, now: float) -> float:
        """The end of the step under way; now if none is."""
        progress = self.progress(now)
        whole = math.ceil(progress - SLACK)
        return now if progress >= self._limit else self.time_of(whole, now)

    def hold(self, steps: int) -> None:
        """No step after this one."""
        self._limit = steps

    def release(self, now: float) -> None:
        """Steps may follow again."""
        if self.progress(now) >= self._limit:
            self.waiting_seconds += self._held_for(now)
            self._done, self._since = self._limit, now
        self._limit = math.inf

    def waited(self, now: float) -> float:
        """Seconds at holds, also at one that holds still."""
        return self.waiting_seconds + (self._held_for(now) if self.progress(now) >= self._limit else 0.0)

    def busy(self, now: float) -> float:
        """Seconds of all steps."""
        return self.progress(now) * self.step_seconds

    def pending(self, now: float) -> float:
        """Seconds of the steps that were not contributed: on average over the fragments."""
        return (self.progress(now) - sum(self.marks) / len(self.marks)) * self.step_seconds

    def discard(self, now: float) -> None:
        """The parameters are those of others now: what was not contributed never will be."""
        self.marks = [self.progress(now)] * len(self.marks)

    def _held_for(self, now: float) -> float:
        return now - self._since - (self._limit - self._done) * self.step_seconds
