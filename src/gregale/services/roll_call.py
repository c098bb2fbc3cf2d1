"""Waiting for the processes of a run before JAX is asked to join them, and saying which are missing.

JAX waits for late processes in silence. So process 0 first listens at the coordinator's port itself, the others come to
it with their numbers, and everybody who waits says for whom. When all are there, process 0 leaves the port to JAX's
coordinator; the connections stay, for `gregale.services.peers`.

    peers = roll_call(config)  # of process 0 all others, of each of the others process 0

What a process says is taken on trust, as JAX's coordinator does: whoever reaches the port can keep a run from starting.
Once it has started, nobody new is heard.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from gregale.errors import UserError
from gregale.services.config import DistributedConfig
from gregale.services.peers import EXIT_CODE, Peer, says, who

_SAYINGS = 10  # while a process waits as long as it may, it says so often for whom
_MOST_SECONDS_BETWEEN = 60.0
_BEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.3
_GREETING_SECONDS = 5.0
_MOST_UNREAD_BYTES = 1024
_SHOWN = 20  # numbers of missing processes in a line


def roll_call(config: DistributedConfig) -> list[Peer]:
    """The processes that this one hears from, as soon as all are there.

    Ends the process with the exit code of a lost one if they are not within `distributed.join_seconds`. Raises
    `UserError` if two processes have one number, or another number of processes than process 0.
    """
    waiting = _Waiting(config)
    try:
        return _Roll(config, waiting).call() if config.process == 0 else [_answered(config, waiting)]
    except _Late as late:
        says(f"error: {late}")
        sys.exit(EXIT_CODE)


class _Late(Exception):
    """Somebody did not come in time."""


class _Waiting:
    """Says at intervals what is waited for, and for how long."""

    def __init__(self, config: DistributedConfig):
        self._most = config.join_seconds
        self._every = min(self._most / _SAYINGS, _MOST_SECONDS_BETWEEN)
        self._began = time.monotonic()
        self._next = self._every

    def for_(self, what: str, late: str) -> None:
        """Goes on waiting; raises `_Late` when it has been long enough.

        - `what`: is waited for
        - `late`: what is to be said then
        """
        waited = time.monotonic() - self._began
        if waited >= self._most:
            raise _Late(f"{late} within {self._most:g} s (distributed.join_seconds).")
        if waited >= self._next:
            says(f"waiting for {what}, {waited:.0f} s so far, {self._most:g} s at most (distributed.join_seconds).")
            self._next += self._every


class _Roll:
    """Process 0: takes the numbers of those that come until all are there."""

    def __init__(self, config: DistributedConfig, waiting: _Waiting):
        self._config, self._waiting = config, waiting
        self._there: dict[int, Peer] = {}
        self._strangers: list[Peer] = []  # that have not said who they are
        self._said = 0.0

    def call(self) -> list[Peer]:
        """All others, when they are there."""
        with self._listening() as server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            try:
                while missing := self._missing():
                    self._listen(server, selector)
                    self._say(_numbered(missing, self._config.processes))
            except _Late as late:
                self._tell_all(f"late {late}")
                raise
        for peer in self._strangers:
            peer.connection.close()
        for peer in self._there.values():
            peer.connection.settimeout(None)
        self._tell_all(f"hello {who(0)}")
        return list(self._there.values())

    def _listen(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_BEAT_SECONDS / 4):
            if key.data is None:
                self._accept(server, selector)
            else:
                self._hear(key.data, selector)
        self._forget_the_silent(selector)

    def _say(self, missing: str) -> None:
        """Who is missing: to the user now and then, to those that wait often, as a sign of life."""
        self._waiting.for_(missing, f"{missing} did not come to {self._config.coordinator}")
        if time.monotonic() - self._said >= _BEAT_SECONDS:
            self._said = time.monotonic()
            self._tell_all(f"missing {missing}")

    def _listening(self) -> socket.socket:
        _, port = _address(self._config)
        taken = f"port {port} of this host, which another program holds (distributed.coordinator)"
        while True:
            try:
                if socket.has_dualstack_ipv6():
                    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
                return socket.create_server(("", port))
            except (OSError, OverflowError) as error:
                if getattr(error, "errno", None) != errno.EADDRINUSE:
                    raise UserError(
                        f"distributed.coordinator is {self._config.coordinator}, but this process cannot listen at "
                        f"port {port} ({error}); give a port from 1024 to 65535."
                    ) from None
            self._waiting.for_(taken, f"{taken} did not become free")
            time.sleep(_RETRY_SECONDS)

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._config.processes) if number not in self._there]

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(_GREETING_SECONDS)
            peer = Peer(connection, "", time.monotonic())
            self._strangers.append(peer)
            selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        """Takes who a stranger is; one that has ended is missing again."""
        if peer not in self._strangers and peer not in self._there.values():  # forgotten a moment ago
            return
        lines = peer.lines()
        if lines is None or len(peer.unread) > _MOST_UNREAD_BYTES:
            self._forget(peer, selector)
        elif lines and peer in self._strangers:
            words = lines[0].split()
            if len(words) != 5 or words[0] != "join" or not words[1].isdecimal() or not words[2].isdecimal():
                self._forget(peer, selector)
                return
            number, processes = int(words[1]), int(words[2])
            peer.name = f"process {number} ({words[4]}, pid {words[3]})"
            if reason := self._refused(number, processes, peer.name):
                says(f"{peer.name} is refused. {reason}")
                peer.tell(f"no {reason}")
                self._forget(peer, selector)
                return
            if (before := self._there.get(number)) is not None:
                before.tell(f"no {_twice(number, peer.name)}")
                self._forget(before, selector)
            self._strangers.remove(peer)
            self._there[number] = peer

    def _refused(self, number: int, processes: int, name: str) -> str | None:
        if processes != self._config.processes:
            return (
                f"{name} has distributed.processes {processes}, and process 0 has {self._config.processes}; give all "
                f"processes the same."
            )
        if not 0 < number < processes:
            return _twice(number, f"the one at {self._config.coordinator}")
        return None

    def _forget(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers = [each for each in self._strangers if each != peer]
        self._there = {number: each for number, each in self._there.items() if each != peer}

    def _forget_the_silent(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for peer in self._strangers:
            if now - peer.heard > _GREETING_SECONDS:
                self._forget(peer, selector)

    def _tell_all(self, line: str) -> None:
        for peer in self._there.values():
            peer.tell(line)


def _answered(config: DistributedConfig, waiting: _Waiting) -> Peer:
    """Process 0, when all are there."""
    while True:
        why = "it does not answer"
        try:
            connection = socket.create_connection(_address(config), _GREETING_SECONDS)
        except (OSError, OverflowError) as error:
            why = str(error)
        else:
            peer = Peer(connection, "process 0", time.monotonic())
            peer.tell(f"join {config.process} {config.processes} {os.getpid()} {socket.gethostname()}")
            with ExitStack() as stack:
                stack.callback(connection.close)
                if _has_all(peer, config):
                    stack.pop_all()
                    return peer
        waiting.for_(
            f"process 0 at {config.coordinator} ({why})", f"process 0 did not answer at {config.coordinator} ({why})"
        )
        time.sleep(_RETRY_SECONDS)


def _has_all(process_0: Peer, config: DistributedConfig) -> bool:
    """Waits until process 0 says that all are there; False if it is silent or gone, so that it may come again."""
    process_0.connection.settimeout(config.timeout_seconds)
    while (lines := process_0.lines()) is not None:
        for place, line in enumerate(lines, 1):
            word, _, rest = line.partition(" ")
            if word == "no":
                raise UserError(rest)
            if word == "late":
                raise _Late(rest)
            if word == "hello":
                process_0.name = rest
                process_0.connection.settimeout(None)
                process_0.unread = "".join(f"{each}\n" for each in lines[place:]).encode() + process_0.unread
                return True
        if len(process_0.unread) > _MOST_UNREAD_BYTES:
            return False
    return False


def _address(config: DistributedConfig) -> tuple[str, int]:
    host, _, port = (config.coordinator or "").rpartition(":")
    return host.strip("[]"), int(port)


def _twice(number: int, other: str) -> str:
    return (
        f"distributed.process is {number} for two processes, this one and {other}; each needs a number of its own, "
        f"and process 0 is the one at the coordinator's address."
    )


def _numbered(missing: Sequence[int], processes: int) -> str:
    shown = [str(number) for number in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        shown.append(f"{len(missing) - _SHOWN} more")
    numbers = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"process{'es' if len(missing) > 1 else ''} {numbers} of {processes}"
