"""Each host's own server: hands its state to joiners, takes small messages and tells how it does. HTTP, authenticated.

    server = Server("127.0.0.1", token, on_message=handle, status=lambda: {"step": 12})
    server.publish(Snapshot(generation=0, round=4, leaves={"wte|0": Leaf(array, version=3)}, facts={"data": ...}))
    server.address                              # "127.0.0.1:41230"
    call(peer, token, {"kind": "due", "round": 5}, timeout_seconds=2.0)    # returns what the peer's on_message returned
    ask_status(peer, token, timeout_seconds=2.0)
    server.close()

A published array must never be changed in place: a commit publishes new arrays. Unchanged arrays may be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


class PeerUnreachable(Exception):
    """A peer did not answer, or not in time; or answered without the token's signature."""


class Refused(Exception):
    """A peer answered that it will not, and why (wrong token, clocks too far apart, unknown message)."""


@dataclass(frozen=True)
class Leaf:
    """One array of the state, and the round that changed it last."""

    array: np.ndarray
    version: int


@dataclass(frozen=True)
class Snapshot:
    """The state after a committed round; `facts` is small JSON that goes with it (position in the data, ...)."""

    generation: int
    round: int
    leaves: dict[str, Leaf]
    facts: dict = field(default_factory=dict)


class Server:
    """Listens on `host` from the start until `close`, at `port` (0: any).

    - `on_message`: called in a thread of the server with a peer's JSON object; what it returns is the reply; may raise
      Refused
    - `status`: called for GET /status
    - `complain`: gets one line for each refused request (at most a few a second)
    """

    address: str
    host: str

    def __init__(
        self,
        bind: str,
        token: bytes,
        on_message: Callable[[dict], dict],
        status: Callable[[], dict] = dict,
        complain: Callable[[str], None] = lambda line: None,
    ): ...

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces the state that is served. A joiner that has begun with the former one may finish it."""

    def close(self) -> None: ...


def call(address: str, token: bytes, message: dict, timeout_seconds: float) -> dict:
    """Sends a small JSON object to a peer; returns its reply. Raises PeerUnreachable or Refused."""
    raise NotImplementedError


def ask_status(address: str, token: bytes, timeout_seconds: float) -> dict:
    """What a peer's `status` returns. Raises PeerUnreachable or Refused."""
    raise NotImplementedError
