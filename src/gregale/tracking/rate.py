"""The rate of the recent steps."""

from collections import deque


class Rate:
    """Tokens per second and seconds per step, over a window of completed steps.

    Both are differences between two completions, so steps in flight on the device do not count. The first step, which
    includes compilation, leaves the window as soon as a second step is complete.
    """

    def __init__(self, now: float, window: int = 20):
        """`now`: start time of the first step, in seconds of any monotonic clock."""
        self._marks: deque[tuple[float, int, int]] = deque([(now, 0, 0)], maxlen=window + 1)
        self._holds_start = True

    def completed(self, tokens: int, now: float) -> None:
        """Record that another step is complete, with `tokens` tokens."""
        _, steps, before = self._marks[-1]
        self._marks.append((now, steps + 1, before + tokens))
        if self._holds_start and len(self._marks) == 3:
            self._marks.popleft()
            self._holds_start = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 until time has passed."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds per step; 0 until a step is complete."""
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else 0.0
