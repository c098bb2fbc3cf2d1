"""The clock of a process, without the time for which it was stopped."""

import time
from collections.abc import Callable

LONGEST_GAP_SECONDS = 0.5  # between two readings of a process that runs
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first also counts while the machine is suspended


class RunningTime:
    """Seconds for which this process ran; `stopped`: for which it did not. Read it every 0.1 s, under one lock.

    A long gap between two readings means that the process was stopped (SIGSTOP), or its machine suspended. So nobody
    else was silent then, and no wait for another process is over.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(CLOCK)):
        self._clock, self._last, self.stopped = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last > LONGEST_GAP_SECONDS:
            self.stopped += now - self._last
        self._last = now
        return now - self.stopped
