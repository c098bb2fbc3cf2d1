"""How fast the last steps went."""

from collections import deque


class Rate:
    """Tokens and seconds a step, over a window of completed steps.

    Both are differences between two completions: nothing is divided by a time stamp, and steps still in flight on the
    device do not count. The first step, which the compiler held up, falls out as soon as a second one is complete.
    """

    def __init__(self, now: float, step: int = 0, window: int = 20):
        """
        Args:
            now: when the first step starts, in seconds of any monotonic clock.
            step: steps completed before (of a resumed run).
            window: completions to look back over.
        """
        self._marks: deque[tuple[float, int, int]] = deque([(now, step, 0)], maxlen=window + 1)
        self._holds_start = True

    def completed(self, step: int, tokens: int, now: float) -> None:
        """Notes that a step is complete.

        Args:
            step: steps completed so far.
            tokens: tokens in the steps completed since the last call.
            now: the time of completion, in seconds.
        """
        self._marks.append((now, step, self._marks[-1][2] + tokens))
        if self._holds_start and len(self._marks) == 3:
            self._marks.popleft()
            self._holds_start = False

    @property
    def tokens_per_second(self) -> float:
        """0 until time has passed."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds a step; 0 until a step is complete."""
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else 0.0
