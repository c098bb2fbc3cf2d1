"""When an island writes its checkpoints: the islands of a fleet take turns."""

import math

from gregale.methods.schedule import Schedule


class Turns:
    """Once in `every` steps of the fleet's schedule, each island at its place in them; never with `every` None.

    So one island after the other is busy with it, and when a whole fleet is lost, the newest of their checkpoints is
    younger than `every` steps. With place k / R the turns are after k / R, 1 + k / R, ... times `every` steps.
    """

    def __init__(self, every: int | None, schedule: Schedule):
        self._every, self._schedule = every, schedule
        self._last: int | None = None  # turn

    def is_due(self, arrived: int | None, place: float) -> bool:
        """Whether it is this island's turn, asked after each step; the turn is then taken.

        - `arrived`: the newest round in its parameters; None: none yet
        - `place`: from 0 to 1; it moves when islands come and go, which may make a turn up to `every` steps later
        """
        if self._every is None or arrived is None:
            return False
        turn = math.floor(self._schedule.round_step(arrived) / self._every - place)
        last = math.floor(self._schedule.round_step(arrived - 1) / self._every - place)
        last = last if self._last is None else self._last
        self._last = max(turn, last)
        return turn > last
