"""What is written down of each round: who took part, how long it took, what was waited for and sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gregale.islands.host_worker import Count
from gregale.islands.protocol.headers import OuterRecord


@dataclass
class Underway:
    """A round as this island goes through it: when it began, and what had been sent and received until then."""

    began: float
    sent: int
    received: int
    waiting: float = 0.0


class RoundLog:
    """Follows the round that is under way; a finished one goes to `record`, for rounds.jsonl.

    - `count`: bytes sent and received so far
    - `members`: who took part in the newest round
    """

    def __init__(self, count: Count, record: Callable[[dict[str, Any]], None]):
        self._count, self._record = count, record
        self._underway: Underway | None = None
        self._waits_since: float | None = None
        self.members: tuple[str, ...] = ()

    def place(self, name: str) -> float:
        """Where an island is among those of the newest round, from 0 to 1: its turn to write a checkpoint."""
        return self.members.index(name) / len(self.members) if name in self.members else 0.0

    def begin(self) -> None:
        """A round, or healing, begins for this island."""
        self._underway = Underway(time.time(), self._count.sent, self._count.received)

    def waits(self) -> None:
        """The trainer begins to wait, most often for the round that is under way."""
        self._waits_since = time.time()

    def waited(self) -> None:
        """It goes on."""
        self._count_waiting()
        self._waits_since = None

    def _count_waiting(self) -> None:
        """What was waited until now belongs to the round that is under way, if there is one."""
        if self._waits_since is None:
            return
        now = time.time()
        if self._underway is not None:
            self._underway.waiting += now - max(self._waits_since, self._underway.began)
        self._waits_since = now

    def end(self, outer: OuterRecord, weight: float, healed: bool = False) -> None:
        """A state is committed, to which this island contributed `weight` tokens, or fetched from a peer."""
        self._count_waiting()
        now, at = time.time(), self._underway or Underway(time.time(), self._count.sent, self._count.received)
        self._underway = None
        self._record(
            {
                "round": outer.round,
                "generation": outer.generation.number,
                "digest": outer.fingerprint(),
                "members": list(self.members),
                "weight": weight,
                "began": at.began,
                "ended": now,
                "seconds": now - at.began,
                "waiting_seconds": at.waiting,
                "bytes_sent": self._count.sent - at.sent,
                "bytes_received": self._count.received - at.received,
                "healed": healed,
            }
        )
