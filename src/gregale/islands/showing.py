"""How an island hands its inner optimizer to one that joins: a copy, on request, by servers that have nothing else.

Each host has a `Showing` and an `Heir`: host k of the joiner takes what host k of the peer shows. Host 0 of the joiner
asks host 0 of the peer, whose trainers copy at the end of the same step; unless all hosts of the joiner have got a copy
of one step, none of them uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Condition
from typing import NamedTuple

from gregale.islands.engine.server import Leaf, PeerUnreachable, Refused, Server, Snapshot, call
from gregale.islands.engine.transfer import TransferFailed, fetch
from gregale.islands.inner import Expected, Inner
from gregale.islands.protocol.headers import Peer

SHOW_SECONDS = 30.0  # for the trainer to come to the end of its step and to copy
TRIES = 2  # of one source: another joiner may have had the copies of some hosts renewed meanwhile


class Shown(NamedTuple):
    """Where a host shows its copy, and after how many steps it was made."""

    address: str
    step: int


class Showing:
    """A peer's side on one host: wants a copy of the trainer, and serves it."""

    def __init__(self, token: bytes, host: str):
        self._token, self._host = token, host
        self._changed, self._wanted = Condition(), False
        self._server: Server | None = None
        self._shown: Shown | None = None

    def is_wanted(self) -> bool:
        """Whether somebody waits for a copy."""
        return self._wanted

    def want(self) -> None:
        """Asks the trainer for a copy at the end of its step."""
        with self._changed:
            self._wanted = True

    def put(self, inner: Inner) -> Shown:
        """Serves a copy, in place of the last one; says where."""
        leaves = {name: Leaf(array, inner.step) for name, array in inner.arrays.items()}
        with self._changed:
            if self._server is None:
                self._server = Server(self._host, self._token, _nothing)
            self._server.publish(Snapshot(0, inner.step, leaves))
            self._shown, self._wanted = Shown(self._server.address, inner.step), False
            self._changed.notify_all()
            return self._shown

    def wait(self) -> Shown:
        """Where the copy is, as soon as there is one. Raises Refused if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._wanted, SHOW_SECONDS) or self._shown is None:
                raise Refused("no step has ended in time")
            return self._shown

    def close(self) -> None:
        """Serves no longer."""
        with self._changed:
            if self._server is not None:
                self._server.close()


class Heir:
    """A joiner's side on one host: its shards of a peer's inner optimizer, until its trainer takes them.

    - `expected`: shape and type of each
    """

    def __init__(self, token: bytes, expected: Expected, seconds: float):
        self._token, self._expected, self._seconds = token, expected, seconds
        self._inner: Inner | None = None
        self._is_wanted = False

    def want(self) -> None:
        """Looks for one: this island has none of its own, or one that is of no use."""
        self._is_wanted = True

    @property
    def wants(self) -> bool:
        """Whether it is still to be looked for; host 0's counts."""
        return self._is_wanted

    @property
    def is_ready(self) -> bool:
        """Whether it is here, and the trainer has not taken it yet; host 0's counts."""
        return self._inner is not None

    def fetch(self, address: str) -> int:
        """Fetches what a peer's host shows there; returns the peer's steps. Raises TransferFailed."""
        self.forget()
        fetched = fetch([address], self._token, self._expected, self._seconds)
        self._inner = Inner(fetched.round, fetched.arrays)
        return fetched.round

    def forget(self) -> None:
        """Lets go of it."""
        self._inner = None

    def settle(self) -> None:
        """A state is installed: what has come by now is what the trainer gets with it."""
        self._is_wanted = self._is_wanted and not self.is_ready

    def take(self) -> Inner | None:
        """Hands it to the trainer, once."""
        inner, self._inner = self._inner, None
        return inner


def inherit(
    heir: Heir, sources: Sequence[Peer], token: bytes, hosts: int, fetch: Callable[[list[str]], Collection[int]]
) -> None:
    """Makes `heir` ready with the optimizer of the first source that gives all of it; without one it stays unready.

    - `heir`: of host 0
    - `hosts`: of this island
    - `fetch`: fetches what is shown at these addresses, of each host one; returns the steps after which each was copied
    """
    if not heir.wants:
        return
    for source in sources:
        for _ in range(TRIES):
            heir.forget()
            try:
                addresses = call(source.hosts[0], token, {"kind": "inner"}, SHOW_SECONDS).get("addresses")
                if not isinstance(addresses, list) or len(addresses) != hosts:
                    break
                if len(set(fetch([str(address) for address in addresses]))) == 1:
                    return
            except (PeerUnreachable, Refused, TransferFailed):
                break
    heir.forget()


def _nothing(message: dict) -> dict:
    del message
    raise Refused("this server takes no messages")
