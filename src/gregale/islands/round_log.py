"""The log of rounds: members, duration, waiting time and bytes of each round."""

import time
from collections.abc import Callable
from typing import Any

from gregale.islands.protocol.headers import OuterRecord
from gregale.islands.transport.group import Count


class RoundLog:
    """The log of one island. It measures the current round, and passes a finished one to `record`, for rounds.jsonl.

    - `count`: bytes sent and received so far
    - `members`: the names of the members of the newest round
    """

    def __init__(self, count: Count, record: Callable[[dict[str, Any]], None]):
        self._count, self._record = count, record
        self._began: float | None = None
        self._sent = self._received = 0  # bytes until then
        self._waiting = 0.0  # seconds since then
        self._waits_since: float | None = None
        self.members: tuple[str, ...] = ()

    def save_offset(self, name: str) -> float:
        """Return an island's position among the members of the newest round, in [0, 1): it staggers checkpoints."""
        return self.members.index(name) / len(self.members) if name in self.members else 0.0

    def begin(self) -> None:
        """Note the start of a round, or of healing."""
        self._began, self._waiting = time.time(), 0.0
        self._sent, self._received = self._count.sent, self._count.received

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
        if self._began is not None:
            self._waiting += now - max(self._waits_since, self._began)
        self._waits_since = now

    def end(self, outer: OuterRecord, weight: float, healed: bool = False) -> None:
        """Record a committed state, with `weight` contributed tokens, or a state fetched from a peer."""
        self._count_waiting()
        if self._began is None:
            self.begin()
        now = time.time()
        began, self._began = self._began or now, None
        self._record(
            {
                "round": outer.round,
                "generation": outer.generation.number,
                "digest": outer.fingerprint(),
                "members": list(self.members),
                "weight": weight,
                "began": began,
                "ended": now,
                "seconds": now - began,
                "waiting_seconds": self._waiting,
                "bytes_sent": self._count.sent - self._sent,
                "bytes_received": self._count.received - self._received,
                "healed": healed,
            }
        )
