"""Turns at regular times, which all processes of a run take at the same step."""

import math
import time
from collections.abc import Callable

import jax

from gregale.distributed.signals import CHECK_EVERY, ProcessFlags


class Elapsed:
    """A turn once in `seconds` by the clock of process 0.

    In a run of several processes a turn comes up to twice `check_every` steps late, see `StopRequest`.

    - `clock`: the time in seconds
    - `begin`: the time from which turns are counted; None: now
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        begin: float | None = None,
        check_every: int = CHECK_EVERY,
    ):
        self._seconds, self._clock, self._check_every = seconds, clock, check_every
        self._begin = clock() if begin is None else begin
        self._processes = ProcessFlags() if jax.process_count() > 1 else None
        self._last = self._turn(0.0)

    def is_due(self, step: int, offset: float = 0.0) -> bool:
        """Return whether it is a turn, and take it; every process calls this after every step, with equal results.

        - `offset`: in [0, 1): turns are at `offset`, 1 + `offset`, ... times `seconds`
        """
        if self._processes is None:
            return self._taken(offset)
        if step % self._check_every:
            return False
        return self._processes.exchanged(jax.process_index() == 0 and self._taken(offset))

    def _taken(self, offset: float) -> bool:
        turn, last = self._turn(offset), self._last
        self._last = max(turn, last)
        return turn > last

    def _turn(self, offset: float) -> int:
        return math.floor((self._clock() - self._begin) / self._seconds - offset)
