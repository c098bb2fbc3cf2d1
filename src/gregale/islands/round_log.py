"""The log of rounds: members, duration, waiting time and bytes of each round."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gregale.islands.protocol.headers import OuterRecord
from gregale.islands.transport.group import Count


@dataclass
class CurrentRound:
    """The current round of this island: its start, and the bytes sent and received until then."""

    began: float
    sent: int
    received: int
    waiting: float = 0.0


class RoundLog:
    """The log of one island. It measures the current round, and passes a finished one to `record`, for rounds.jsonl.

    - `count`: bytes sent and received so far
    - `members`: the names of the members of the newest round
    """

    def __init__(self, count: Count, record: Callable[[dict[str, Any]], None]):
        self._count, self._record = count, record
        self._current: CurrentRound | None = None
        self._waits_since: float | None = None
        self.members: tuple[str, ...] = ()

    def save_offset(self, name: str) -> float:
        """Return an island's position among the members of the newest round, in [0, 1): it staggers checkpoints."""
        return self.members.index(name) / len(self.members) if name in self.members else 0.0

    def begin(self) -> None:
        """Note the start of a round, or of healing."""
        self._current = CurrentRound(time.time(), self._count.sent, self._count.received)

    def wait_begins(self) -> None:
        """Note that the trainer starts to wait, usually for the current round."""
        self._waits_since = time.time()

    def wait_ends(self) -> None:
        """Note that the trainer continues."""
        self._count_waiting()
        self._waits_since = None

    def _count_waiting(self) -> None:
        """Add the waiting time until now to the current round, if there is one."""
        if self._waits_since is None:
            return
        now = time.time()
        if self._current is not None:
            self._current.waiting += now - max(self._waits_since, self._current.began)
        self._waits_since = now

    def end(self, outer: OuterRecord, weight: float, healed: bool = False) -> None:
        """Record a committed state, with `weight` contributed tokens, or a state fetched from a peer."""
        self._count_waiting()
        now, at = time.time(), self._current or CurrentRound(time.time(), self._count.sent, self._count.received)
        self._current = None
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
