"""What is the same in every simulated world: its clock, and a process in it that drives a real member.

The protocol's simulator and the model of failures (`gregale.islands.failures`) have their own islands on top of it.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.member import Member


class Clock:
    """Simulated time, in seconds: what happens later happens in this order, the same every time."""

    def __init__(self) -> None:
        self.now, self._count = 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Something happens after a while."""
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, what))


class Process(ABC):
    """One process of one island: it ends with its death, or when it left. Its member is woken when it wants to be."""

    def __init__(self, clock: Clock, member: Member, least_tick_seconds: float):
        self._clock, self.member, self._least_tick_seconds = clock, member, least_tick_seconds
        self.name = member.identity.name
        self.identity = f"{self.name}/{member.identity.session}"
        self.alive = True
        self.asking = 0  # the number of the ask whose answer is awaited; 0: of none
        self._wake_at = math.inf

    @abstractmethod
    def tell(self, event: m.Event) -> None:
        """An event reaches the member; its actions are carried out."""

    @abstractmethod
    def tick(self) -> None:
        """Nothing happens but that time has passed."""

    def wake_in_time(self) -> None:
        """The member hears of the time when it needs to, if nothing else happens before."""
        at = max(self.member.next_tick(), self._clock.now + self._least_tick_seconds)
        if self.alive and at < self._wake_at:
            self._wake_at = at
            self._clock.later(at - self._clock.now, lambda: self._woken(at))

    def _woken(self, at: float) -> None:
        if at == self._wake_at:
            self._wake_at = math.inf
            self.tick()

    def begin_to_ask(self, number: int) -> None:
        """The ask with this number is given up after a while."""
        self.asking = number
        self._clock.later(self.member.timing.ask_seconds, lambda: self.give_up(number))

    def give_up(self, number: int) -> None:
        """No answer comes, or none that is heard."""
        if self.asking == number:
            self.asking = 0
            self.tell(m.NoView("no answer"))

    def answer(self, number: int, event: m.Seen) -> None:
        """The coordinator's answer to an ask arrives."""
        if self.asking == number:
            self.asking = 0
            self.tell(event)
