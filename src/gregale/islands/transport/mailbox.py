"""Values that peers leave for a group that is about to be built, perhaps before this host knows of it."""

from __future__ import annotations

import json
import threading
import time

from gregale.islands.transport.client import RequestRejected

LARGEST_VALUE_BYTES = 64 << 10
MOST_VALUES = 4096
KEPT_SECONDS = 120.0


class Mailbox:
    """A bounded number of values by (group, key); who waits for one is woken when it comes."""

    def __init__(self):
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._given_up: set[str] = set()

    def post(self, body: bytes) -> dict:
        """A peer's `put` over HTTP: JSON with group, key and the value as hexadecimal digits."""
        posted = json.loads(body)
        self.put(posted["group"], posted["key"], bytes.fromhex(posted["value"]))
        return {}

    def put(self, group: str, key: str, value: bytes) -> None:
        with self._changed:
            oldest = time.monotonic() - KEPT_SECONDS
            self._values = {name: kept for name, kept in self._values.items() if kept[0] > oldest}
            if len(value) > LARGEST_VALUE_BYTES or len(self._values) >= MOST_VALUES:
                raise RequestRejected("there is no room for this value")
            self._values[group, key] = time.monotonic(), value
            self._changed.notify_all()

    def get(self, group: str, key: str, timeout_seconds: float) -> bytes | None:
        """The value, once it is there; None if it does not come in time, or the group is given up."""
        with self._changed:
            self._changed.wait_for(lambda: (group, key) in self._values or group in self._given_up, timeout_seconds)
            kept = None if group in self._given_up else self._values.get((group, key))
            return None if kept is None else kept[1]

    def give_up(self, group: str) -> None:
        """Nobody waits for this group's values any more, until it is forgotten."""
        with self._changed:
            self._given_up.add(group)
            self._changed.notify_all()

    def is_given_up(self, group: str) -> bool:
        return group in self._given_up

    def forget(self, group: str) -> None:
        with self._changed:
            self._given_up.discard(group)
            self._values = {name: kept for name, kept in self._values.items() if name[0] != group}
