"""A group of islands' hosts that exchange bytes: a Gloo process group of PyTorch with a failure detector.

The addresses of Gloo's own sockets travel over the members' authenticated servers, so that no store listens. Gloo's
connections are not authenticated: bind them to an address that only the fleet reaches.

This module adds two properties to Gloo (torch 2.13, tests/islands/transport/test_group.py):

- Gloo fails only messages to or from a dead member. So a thread for each peer waits for a byte that is never sent: when
  its connection ends, the whole group has failed.
- `abort` and `shutdown` leave the sockets open. A wait that times out closes all of them, here and so at the others:
  `drop` waits a millisecond for a byte that is never sent.
"""

import atexit
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import numpy as np

from gregale.errors import UserError, install_hint
from gregale.islands.transport.gloo_store import make_gloo_store
from gregale.islands.transport.server import Server

# Tags of a group's messages are below this one.
SILENT_TAG = 1 << 30
NO_TIMEOUT = timedelta(days=1000)
# Gloo's error in all other waits when one has timed out.
CLOSED_HERE = "Application timeout"
LOG = logging.getLogger(__name__)  # Gloo's original errors, at debug level
# Explanations of Gloo's errors by a part of their text; the first match counts.
EXPLANATIONS = {
    "Connection closed by peer": "it closed the connection",
    "Connection reset": "it closed the connection",
    "Broken pipe": "it closed the connection",
    "Connection refused": "no process listens there",
    "No route to host": "there is no route to it",
    "Network is unreachable": "there is no route to it",
    "Cannot assign requested address": "this host does not have the address islands.bind",
    "imed out": "it did not answer in time",
    "imeout": "it did not answer in time",
}
# Gloo's number of connection attempts, each limited by its `timeout`.
CONNECT_TRIES = 5
POLL_SECONDS = 0.05  # between two checks whether a group was cancelled
MISSING = "gregale island needs the extra `islands`. " + install_hint("islands")


class GroupFailed(Exception):
    """A member of the group died, was cut off, dropped the group, or did not answer in time."""


class Work:
    """A message in progress. Neither change nor free the array until `wait` has returned or raised."""

    def __init__(self, group: "Group", work: Any, array: np.ndarray, what: str):
        self._group, self._array, self._what = group, array, what
        self._work: Any = work

    def wait(self, timeout_seconds: float) -> None:
        """Return when the message has arrived (or was sent); raise GroupFailed, also after the timeout.

        The group cannot be used after an error.
        """
        if self._work is None:
            return
        error = attempt(lambda: self._work.wait(timedelta(seconds=timeout_seconds)))
        self._work = None
        self._group.forget(self)
        if error is not None:
            is_late = "Timed out waiting" in error
            failed = f"took more than {timeout_seconds:g} s" if is_late else f"failed: {explain(error)}"
            reason = f"{self._what} {failed}"
            raise GroupFailed(self._group.fail_for(error, reason))


OPEN_GROUPS: "weakref.WeakSet[Group]" = weakref.WeakSet()
CONNECTING: "weakref.WeakSet[Connecting]" = weakref.WeakSet()


@atexit.register
def drop_all() -> None:
    """Drop all groups at exit: a thread that returned from Gloo into an ended interpreter would abort the process."""
    for connecting in list(CONNECTING):
        connecting.join()
    for group in list(OPEN_GROUPS):
        group.drop()


@dataclass
class Count:
    """Bytes that a host has sent and received."""

    sent: int = 0
    received: int = 0


class Group:
    """Members `0 .. size - 1` that can send to each other: the link of a reducer.

    - `failure`: why it cannot be used any more, or empty
    - `count`: of the bytes of its messages
    """

    def __init__(self, gloo: Any, torch: Any, rank: int, names: Sequence[str]):
        self.rank, self.size, self.failure, self.count = rank, len(names), "", Count()
        self._gloo, self._torch, self._names = gloo, torch, list(names)
        self._lock = threading.Lock()
        self._has_failed = threading.Event()
        self._under_way: set[Work] = set()  # Gloo holds no reference to a message or its memory
        self._watchers = [
            threading.Thread(target=self._watch, args=(peer,), name=f"gregale-group-{peer}", daemon=True)
            for peer in self._peers()
        ]
        for watcher in self._watchers:
            watcher.start()
        OPEN_GROUPS.add(self)

    @classmethod
    def build(
        cls,
        key: str,
        rank: int,
        hosts: Sequence[str],
        server: Server,
        timeout_seconds: float,
        names: Sequence[str] = (),
    ) -> "Group":
        """Build the group of a key; all members must join within the timeout.

        - `key`: never used before by another group, even a failed one (hash it with the view's `instant`)
        - `hosts`: addresses of the members' servers in the order of ranks, including the own one
        - `server`: the own server; Gloo listens on the same address
        - `names`: the members' names in messages; default: their addresses

        Raises GroupFailed.
        """
        load_torch()
        connecting = Connecting(
            key,
            rank,
            dict(zip(names or [host.partition("/")[0] for host in hosts], hosts, strict=True)),
            server,
            timeout_seconds,
        )
        connecting.start()
        while connecting.is_alive() and not server.mailbox.is_cancelled(key):
            connecting.join(POLL_SECONDS)
        return connecting.result()

    def send(self, peer: int, data: np.ndarray, tag: int = 0) -> Work:
        """Send a contiguous uint8 array to a member. Messages of one tag arrive in order. Raises GroupFailed."""
        self.count.sent += data.nbytes
        return self._begin("send", peer, data, tag, f"sending to {self._names[peer]}")

    def recv(self, peer: int, data: np.ndarray, tag: int = 0) -> Work:
        """Receive exactly `data.size` bytes into a contiguous, writable uint8 array. Raises GroupFailed."""
        assert data.flags.writeable
        self.count.received += data.nbytes
        return self._begin("recv", peer, data, tag, f"receiving from {self._names[peer]}")

    def drop(self) -> None:
        """Close the sockets, so that every other member's waits fail at once. Safe from any thread, and twice.

        Waits in progress in this process fail too. A group that has not failed is dropped when all its members are
        known to have finished with it.
        """
        self.fail("the group was dropped here")
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join(5.0)
        self._under_way.clear()
        OPEN_GROUPS.discard(self)

    def fail(self, reason: str) -> None:
        """Record the first reason, and close the sockets."""
        with self._lock:
            gloo, self._gloo = self._gloo, None
            if gloo is None:
                return
            self.failure = reason
        self._has_failed.set()
        silent = self._torch.zeros(1, dtype=self._torch.uint8)
        # A connection that is closed already fails at once and leaves the others open: the next one times out.
        for peer in self._peers():
            attempt(lambda peer=peer: gloo.recv([silent], peer, SILENT_TAG + 1).wait(timedelta(milliseconds=1)))

    def fail_for(self, error: str, reason: str) -> str:
        """Fail the group for a Gloo error, unless another wait recorded the cause of that error; return the reason."""
        if CLOSED_HERE not in error or not self._has_failed.wait(1.0):
            self.fail(reason)
        return self.failure

    def forget(self, work: Work) -> None:
        self._under_way.discard(work)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _begin(self, call: str, peer: int, array: np.ndarray, tag: int, what: str) -> Work:
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert 0 <= tag < SILENT_TAG
        gloo = self._gloo
        if gloo is None:
            raise GroupFailed(self.failure)
        if array.size == 0:
            return Work(self, None, array, what)  # both sides know its size: no transfer is needed
        works = []
        error = attempt(lambda: works.append(getattr(gloo, call)([tensor_of(self._torch, array)], peer, tag)))
        if error is not None:
            self.fail(f"{what} failed: {explain(error)}")
            raise GroupFailed(self.failure)
        work = Work(self, works[0], array, what)
        self._under_way.add(work)
        return work

    def _watch(self, peer: int) -> None:
        """Wait for the end of the connection to a peer."""
        gloo = self._gloo
        if gloo is None:
            return
        silent = self._torch.zeros(1, dtype=self._torch.uint8)
        error = attempt(lambda gloo=gloo: gloo.recv([silent], peer, SILENT_TAG).wait(NO_TIMEOUT))
        del gloo
        self.fail_for(error or "", f"the connection to {self._names[peer]} has ended")


class Connecting(threading.Thread):
    """Gloo's connecting in a thread, because it can be abandoned but not stopped.

    A member that waited for it would be late for the next group, and delay the members of that group.
    """

    def __init__(self, key: str, rank: int, hosts: Mapping[str, str], server: Server, timeout_seconds: float):
        """`hosts`: the members' addresses by name, in the order of ranks."""
        super().__init__(name=f"gregale-connecting-{rank}", daemon=True)
        self._key, self._rank, self._hosts, self._server = key, rank, hosts, server
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._is_abandoned, self._group, self._error = False, None, "it was cancelled"
        CONNECTING.add(self)

    def run(self) -> None:
        torch, made = load_torch(), []
        error = attempt(lambda: made.append(self._connected(torch.distributed)))
        with self._lock:
            if error is not None:
                self._error = error
            else:
                self._group = Group(made.pop(), torch, self._rank, list(self._hosts))
            if self._is_abandoned and self._group is not None:
                self._group.drop()
        self._server.mailbox.forget(self._key)
        CONNECTING.discard(self)

    def result(self) -> Group:
        """Return the group if it is connected; otherwise abandon it and raise GroupFailed with the reason."""
        with self._lock:
            self._is_abandoned = True
            if self._group is None:
                raise GroupFailed(f"The group of {len(self._hosts)} has not come together: {self._error}")
            return self._group

    def _connected(self, distributed: Any) -> Any:
        store = make_gloo_store(distributed, self._server, self._key, self._hosts, self._timeout_seconds)
        made: list[Any] = []
        error = attempt(lambda: made.append(self._gloo(distributed, store)))
        if error is not None:
            raise RuntimeError(store.fault or f"connecting failed: {explain(error)}")
        return made.pop()

    def _gloo(self, distributed: Any, store: Any) -> Any:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._timeout_seconds / CONNECT_TRIES)
        options._threads = 1
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._server.host, lazy_init=False)]
        return distributed.ProcessGroupGloo(store, self._rank, len(self._hosts), options)


def attempt(call: Any) -> str | None:
    """Call Gloo; return only the text of its error, because the traceback would keep the group's sockets open."""
    try:
        call()
    except RuntimeError as error:
        LOG.debug("%s", error)
        return str(error)
    return None


def explain(error: str) -> str:
    """Return an explanation of a Gloo error, whose text has only file names and sockets."""
    return next((meaning for words, meaning in EXPLANATIONS.items() if words in error), "the connection broke")


def tensor_of(torch: Any, array: np.ndarray) -> Any:
    """Return a tensor that shares the array's memory. (`torch.from_numpy` warns of read-only arrays.)"""
    memory = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


def load_torch() -> ModuleType:
    """Return PyTorch with its process groups. Call it only after JAX has its devices: both configure threads."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # otherwise Gloo's own errors reach the user's terminal
    try:
        import torch.distributed

    except ImportError:
        raise UserError(MISSING) from None
    return torch
