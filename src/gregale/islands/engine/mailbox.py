"""Values that peers leave for a group that is about to be built, perhaps before this host knows of it."""

from __future__ import annotations

import json
import threading
import time

from gregale.islands.engine.client import Refused

LARGEST_VALUE_BYTES = 64 << 10
MOST_VALUES = 4096
KEPT_SECONDS = 120.0


class Mailbox:
    """A bounded number of values by (group, key); who waits for one is woken when it comes."""

    def __init__(self):
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], tuple[float, bytes]] = {}

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
                raise Refused("there is no room for this value")
            self._values[group, key] = time.monotonic(), value
            self._changed.notify_all()

    def get(self, group: str, key: str, timeout_seconds: float) -> bytes | None:
        """The value, once it is there; None if it does not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: (group, key) in self._values, timeout_seconds):
                return None
            return self._values[group, key][1]

    def forget(self, group: str) -> None:
        with self._changed:
            self._values = {name: kept for name, kept in self._values.items() if name[0] != group}
