"""A group of islands' hosts that exchange bytes: a Gloo process group of PyTorch with hands on its sockets.

    group = Group.build(key, rank, hosts, server, timeout_seconds=10.0)   # hosts: addresses of the members' Servers
    work = group.send(peer, message, tag=3)                               # uint8, contiguous; returns at once
    other = group.receive(peer, buffer, tag=3)
    other.wait(5.0); work.wait(5.0)                                       # GroupFailed, also when a peer dies
    group.drop()                                                          # all others know within a second

The addresses of Gloo's own sockets travel over the members' authenticated servers, so that no store listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gregale.islands.engine.server import Server


class GroupFailed(Exception):
    """A member of the group died, was cut off, dropped the group, or did not answer in time."""


class Work:
    """A message under way. The array must neither be changed nor freed until `wait` has returned or raised."""

    def wait(self, timeout_seconds: float) -> None:
        """Returns when the message is there (or sent); raises GroupFailed."""
        raise NotImplementedError

    def is_done(self) -> bool:
        raise NotImplementedError


class Group:
    """Members `0 .. size - 1` that can send to each other."""

    rank: int
    size: int

    @classmethod
    def build(cls, key: str, rank: int, hosts: Sequence[str], server: Server, timeout_seconds: float) -> Group:
        """Meets the others under a key; all of them have to come within the time.

        - `key`: never used before by any other group, also a failed one (hash it with the view's `instant`)
        - `hosts`: addresses of the members' servers in the order of ranks, the own one among them
        - `server`: the own server; Gloo listens on the same address

        Raises GroupFailed.
        """
        raise NotImplementedError

    def send(self, peer: int, array: np.ndarray, tag: int = 0) -> Work:
        """Sends a contiguous uint8 array to a member. Messages of one tag arrive in order. Raises GroupFailed."""
        raise NotImplementedError

    def receive(self, peer: int, array: np.ndarray, tag: int = 0) -> Work:
        """Receives exactly `array.size` bytes into a contiguous, writable uint8 array. Raises GroupFailed."""
        raise NotImplementedError

    def drop(self) -> None:
        """Closes the sockets, so that every other member's waits fail at once. May be called from any thread, twice.

        Waits that are under way in this process fail too.
        """
        raise NotImplementedError
