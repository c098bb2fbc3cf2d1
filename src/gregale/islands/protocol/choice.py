"""The choice of a coordinator, where there are several; without sockets, clocks or threads.

An island sends heartbeats to all coordinators, and its requests to one: to the one that hears most islands and is heard
by them, of equals to the first in the list. A silent one is left at once, another one when it was better for two
heartbeats.

Views of several coordinators have an order: that of their terms, and those of one term in the order in which they were
formed. A term is a number that only one process of a coordinator has. A member sends a request under the coordinator's
term, and never again one under a lower term. A coordinator that gets a request of a higher term begins a term that is
higher still, and drops the requests that it holds; a view has requests of its own term only. So the requests of each
member have the order of the views that they are in, as if one coordinator had formed all views. With one coordinator
there are no terms.
"""

import math
from dataclasses import dataclass

from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT, NEVER, Record

SILENT_BEATS = 3  # heartbeats without an answer, after which a coordinator is silent: one answer may be late
BETTER_BEATS = 2  # for which another coordinator has been better before it is chosen


@dataclass
class Heard:
    at: float = -math.inf  # of its last answer
    hears: int = 0
    term: int = 0
    record: Record | None = None  # the last state of the run that it has recorded


class Choice:
    """The coordinators as one island sees them.

    - `count`: of coordinators, in the order of the list
    - `current`: the index of the chosen one
    """

    def __init__(self, count: int, heartbeat_seconds: float):
        self.current, self._promised = 0, 0
        self._all = [Heard() for _ in range(count)]
        self._beat_seconds = heartbeat_seconds / BEATS_PER_TIMEOUT
        self._since: float | None = None  # when this island first looked
        self._better: tuple[int, float] = (0, 0.0)  # another coordinator, and since when it has been better

    def answered(self, index: int, hears: int, now: float, record: Record | None = None) -> None:
        heard = self._all[index]
        heard.at, heard.hears, heard.record = now, hears, record

    @property
    def recorded(self) -> Record | None:
        """The last state of the run that more than half of the coordinators have recorded, as their answers say."""
        records = [heard.record for heard in self._all]
        return next((each for each in records if each and 2 * records.count(each) > len(records)), None)

    def to_record(self, own: Record | None) -> Record | None:
        """Return what this island asks all coordinators to record, which has saved its `own` last state."""
        return self.recorded or own or next((heard.record for heard in self._all if heard.record), None)

    def is_heard(self, index: int, now: float) -> bool:
        return now - self._all[index].at <= SILENT_BEATS * self._beat_seconds

    def look(self, now: float) -> bool:
        """Return whether the island turns to another coordinator now: an unanswered request has failed then."""
        self._since = now if self._since is None else self._since
        order = range(len(self._all))
        heard = [index for index in order if self.is_heard(index, now)]
        best = max(heard, key=lambda index: (self._all[index].hears, -index), default=self.current)
        if best != self._better[0]:
            self._better = best, now
        if best == self.current:
            return False
        if self.is_heard(self.current, now):
            seconds = BETTER_BEATS * self._beat_seconds
        else:
            seconds = SILENT_BEATS * self._beat_seconds - (now - self._since)  # the first may be about to answer
        if now - self._better[1] < seconds:
            return False
        self.current = best
        return True

    def request(self, needed: int, is_fresh: bool) -> tuple[int, int, int]:
        """Return the coordinator of a request that is about to be sent, its term, and the number of needed islands.

        - `is_fresh`: the island has only the state of the common seed
        """
        if len(self._all) == 1:
            return 0, 0, needed
        self._promised = max(self._promised, self._all[self.current].term, 1)
        return self.current, self._promised, NEVER if is_fresh and self.current else needed

    def told(self, index: int, term: int) -> None:
        self._all[index].term = term
