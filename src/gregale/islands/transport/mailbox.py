"""The mailbox for rendezvous values of a group, which may arrive before this host starts to build the group."""

import json
import threading
import time

from gregale.islands.transport.client import RequestRejected

LARGEST_VALUE_BYTES = 64 << 10
MAX_VALUES = 4096
KEPT_SECONDS = 120.0


class Mailbox:
    """A limited number of values by (group, key); a thread that waits for one wakes when it arrives."""

    def __init__(self):
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._cancelled: set[str] = set()

    def post(self, body: bytes) -> dict:
        """Store a peer's value: JSON with group, key and the value as hexadecimal digits."""
        posted = json.loads(body)
        self.put(posted["group"], posted["key"], bytes.fromhex(posted["value"]))
        return {}

    def put(self, group: str, key: str, value: bytes) -> None:
        with self._changed:
            oldest = time.monotonic() - KEPT_SECONDS
            self._values = {name: kept for name, kept in self._values.items() if kept[0] > oldest}
            if len(value) > LARGEST_VALUE_BYTES or len(self._values) >= MAX_VALUES:
                raise RequestRejected("there is no room for this value")
            self._values[group, key] = time.monotonic(), value
            self._changed.notify_all()

    def get(self, group: str, key: str, timeout_seconds: float) -> bytes | None:
        """Return the value; wait for it. None after the timeout, or if the group is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: (group, key) in self._values or group in self._cancelled, timeout_seconds)
            kept = None if group in self._cancelled else self._values.get((group, key))
            return None if kept is None else kept[1]

    def cancel(self, group: str) -> None:
        """Cancel all waits for this group's values, until `forget`."""
        with self._changed:
            self._cancelled.add(group)
            self._changed.notify_all()

    def is_cancelled(self, group: str) -> bool:
        return group in self._cancelled

    def forget(self, group: str) -> None:
        with self._changed:
            self._cancelled.discard(group)
            self._values = {name: kept for name, kept in self._values.items() if name[0] != group}
