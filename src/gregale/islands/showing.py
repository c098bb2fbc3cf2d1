"""How an island hands its inner optimizer to one that joins: a copy, on request, by a server that has nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition
from typing import Any

from gregale.islands.engine.server import Leaf, PeerUnreachable, Refused, Server, Snapshot, call
from gregale.islands.engine.transfer import TransferFailed, fetch
from gregale.islands.inner import Expected, Inner
from gregale.islands.protocol.headers import Peer

SHOW_SECONDS = 30.0  # for the trainer to come to the end of its step and to copy


class Showing:
    """A peer's side: wants a copy of the trainer, and serves it."""

    def __init__(self, token: bytes, host: str):
        self._token, self._host = token, host
        self._changed, self._wanted = Condition(), False
        self._server: Server | None = None
        self._step = 0

    def is_wanted(self) -> bool:
        """Whether somebody waits for a copy."""
        return self._wanted

    def want(self) -> None:
        """Asks the trainer for a copy at the end of its step."""
        with self._changed:
            self._wanted = True

    def put(self, inner: Inner) -> None:
        """Serves a copy, in place of the last one."""
        leaves = {name: Leaf(array, inner.step) for name, array in inner.arrays.items()}
        with self._changed:
            if self._server is None:
                self._server = Server(self._host, self._token, _nothing)
            self._server.publish(Snapshot(0, inner.step, leaves))
            self._step, self._wanted = inner.step, False
            self._changed.notify_all()

    def wait(self) -> dict[str, Any]:
        """Where the copy is, as soon as there is one. Raises Refused if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._wanted, SHOW_SECONDS) or self._server is None:
                raise Refused("no step has ended in time")
            return {"address": self._server.address, "step": self._step}

    def close(self) -> None:
        """Serves no longer."""
        with self._changed:
            if self._server is not None:
                self._server.close()


def fetch_inner(sources: Sequence[Peer], token: bytes, expected: Expected, timeout_seconds: float) -> Inner | None:
    """The inner optimizer of the first source that gives it; None if none does, or if nothing is expected.

    Without it an island begins with its own.
    """
    for source in sources if expected else ():
        try:
            told = call(source.hosts[0], token, {"kind": "inner"}, SHOW_SECONDS)
            fetched = fetch([told["address"]], token, expected, timeout_seconds)
        except (PeerUnreachable, Refused, TransferFailed, KeyError):
            continue
        return Inner(fetched.round, fetched.arrays)
    return None


def _nothing(message: dict) -> dict:
    del message
    raise Refused("this server takes no messages")
