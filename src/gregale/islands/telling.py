"""Small things that are said to others in threads of their own; whether they arrive does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gregale.islands.engine.client import PeerUnreachable, Refused, call

TELL_SECONDS = 2.0
THREADS = 8


class Telling:
    """Tells peers with this fleet's `token`."""

    def __init__(self, token: bytes):
        self._token, self._threads = token, ThreadPoolExecutor(THREADS, "telling")

    def due(self, addresses: Sequence[str], number: int) -> None:
        """Tells these peers that a round is due. What does not arrive is told again."""
        for address in addresses:
            self.soon(lambda address=address: self._due(address, number))

    def soon(self, what: Callable[[], object]) -> None:
        """Does something else that may take a while."""
        self._threads.submit(what)

    def close(self) -> None:
        """Begins nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _due(self, address: str, number: int) -> None:
        with suppress(PeerUnreachable, Refused):
            call(address, self._token, {"kind": "due", "round": number}, TELL_SECONDS)
