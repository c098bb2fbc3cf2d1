"""Waiting for the processes of a run before JAX is asked to join them, and saying which are missing.

JAX waits for late processes in silence. So process 0 first listens at the coordinator's port itself, the others come to
it with their numbers, and everybody who waits says for whom. When all are there, process 0 leaves the port to JAX's
coordinator; the connections stay, for `gregale.distributed.liveness`.

    peers = roll_call(config)  # of process 0 all others, of each of the others process 0

Both sides prove that they have the secret of `distributed.token_file`, with words that the other has drawn for this
connection; without one, whoever reaches the port is believed, and can keep a run from starting. Of two processes with
one number, all are told, with the names of both. Once the run has started, nobody new is heard.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from gregale.data.sources.base import expand
from gregale.distributed.config import DistributedConfig
from gregale.distributed.handshake import JoinRequest
from gregale.distributed.liveness import EXIT_CODE, Peer, log_line, process_label
from gregale.distributed.signing import read_token
from gregale.errors import UserError

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
    `UserError` in all that came if two processes have one number, and in one that has another number of processes, or
    another secret, than process 0.
    """
    token = b"" if config.token_file is None else read_token(Path(expand(config.token_file)), "distributed.token_file")
    waiting = _Waiting(config)
    try:
        if config.process == 0:
            return RendezvousServer(config, token, waiting).call()
        return [_answered(config, token, waiting)]
    except RendezvousTimeout as late:
        log_line(f"error: {late}")
        sys.exit(EXIT_CODE)


class RendezvousTimeout(Exception):
    """Somebody did not come in time."""


class _Waiting:
    """Says at intervals what is waited for, and for how long."""

    def __init__(self, config: DistributedConfig):
        self._most = config.join_seconds
        self._every = min(self._most / _SAYINGS, _MOST_SECONDS_BETWEEN)
        self._began = time.monotonic()
        self._next = self._every

    def for_(self, what: str, late: str) -> None:
        """Goes on waiting; raises `RendezvousTimeout` when it has been long enough.

        - `what`: is waited for
        - `late`: what is to be said then
        """
        waited = time.monotonic() - self._began
        if waited >= self._most:
            raise RendezvousTimeout(f"{late} within {self._most:g} s (distributed.join_seconds).")
        if waited >= self._next:
            log_line(f"waiting for {what}, {waited:.0f} s so far, {self._most:g} s at most (distributed.join_seconds).")
            self._next += self._every


_STRANGER = JoinRequest(-1, 0, 0, "", "")


@dataclass(eq=False)
class _Caller(Peer):
    """A process that came to process 0.

    - `word`: what it was given to prove the secret with
    - `greeting`: who it is, as soon as it has said it
    """

    word: str = field(default_factory=lambda: secrets.token_hex(16))
    greeting: JoinRequest = _STRANGER


class RendezvousServer:
    """Process 0: takes the numbers of those that come until all are there."""

    def __init__(self, config: DistributedConfig, token: bytes, waiting: _Waiting):
        self._config, self._token, self._waiting = config, token, waiting
        self._there: dict[int, _Caller] = {}
        self._rivals: dict[int, _Caller] = {}  # who came with a number while another, who is asked, has it
        self._strangers: set[_Caller] = set()
        self._own, self._is_over = JoinRequest.of(config, secrets.token_hex(16)), Event()
        self._mistake: UserError | None = None  # told by another process 0
        self._said = 0.0

    def call(self) -> list[Peer]:
        """All others, when they are there."""
        Thread(target=self._visit, daemon=True, name="roll call").start()
        try:
            with self._listening() as server, selectors.DefaultSelector() as selector:
                selector.register(server, selectors.EVENT_READ)
                while (missing := self._missing()) or self._rivals:
                    self._listen(server, selector)
                    self._say(_numbered(missing, self._config.processes))
        except RendezvousTimeout as late:
            self._tell_all(f"late {late}")
            raise
        except UserError as error:
            self._tell_all(f"no {error}")
            raise
        finally:
            self._is_over.set()
        for peer in self._strangers:
            peer.connection.close()
        for peer in self._there.values():
            peer.connection.settimeout(None)
            peer.tell(f"hello {peer.greeting.answer(self._token, process_label(0))}")
        return [*self._there.values()]

    def _listen(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_BEAT_SECONDS / 4):
            if key.data is None:
                self._accept(server, selector)
            else:
                self._hear(key.data, selector)
        self._forget_the_silent(selector)

    def _say(self, missing: str) -> None:
        """Who is missing: to the user now and then, to those that wait often, as a sign of life."""
        self._wait_for(missing, f"{missing} did not come to {self._config.coordinator}")
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
            self._wait_for(taken, f"{taken} did not become free")
            time.sleep(_RETRY_SECONDS)

    def _wait_for(self, what: str, late: str) -> None:
        if self._mistake is not None:
            raise self._mistake
        self._waiting.for_(what, late)

    def _visit(self) -> None:
        """Comes to the coordinator's address as the others do: who answers there may be another process 0."""
        while not self._is_over.is_set():
            address = _address(self._config)
            with (
                suppress(OSError, RendezvousTimeout),
                socket.create_connection(address, _GREETING_SECONDS) as connection,
            ):
                try:
                    _has_all(Peer(connection, "", time.monotonic()), self._own, self._config, self._token)
                except UserError as error:
                    self._mistake = error
                return
            self._is_over.wait(_RETRY_SECONDS)

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._config.processes) if number not in self._there]

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(_GREETING_SECONDS)
            peer = _Caller(connection, "", time.monotonic())
            self._strangers.add(peer)
            peer.tell(f"who {peer.word}")
            selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Caller, selector: selectors.BaseSelector) -> None:
        """Takes who a stranger is; one that has ended is missing again."""
        if peer.connection.fileno() < 0:  # forgotten a moment ago
            return
        lines = peer.lines()
        if lines is None or len(peer.unread) > _MOST_UNREAD_BYTES:
            self._forget(peer, selector)
        elif lines and peer in self._strangers:
            found = JoinRequest.parse(lines[0], self._token, peer.word)
            if found is None or found[0].nonce == self._own.nonce:
                self._forget(peer, selector)
            elif reason := self._refused(*found):
                log_line(f"{found[0].name} is refused. {reason}")
                peer.tell(f"no {reason}")
                self._forget(peer, selector)
            else:
                self._take(peer, found[0])
        elif "there" in lines and (rival := self._rivals.get(peer.greeting.number)) is not None:
            raise self._twice(rival, peer.name)

    def _take(self, peer: _Caller, greeting: JoinRequest) -> None:
        """Takes a process for the one with its number, unless another one with it answers."""
        number, peer.name, peer.greeting = greeting.number, greeting.name, greeting
        self._strangers.discard(peer)
        if number == 0:
            raise self._twice(peer, process_label(0))
        if number not in self._there:
            self._there[number] = peer
            return
        if number in self._rivals:
            raise self._twice(peer, self._rivals[number].name)
        self._rivals[number] = peer
        self._there[number].tell("there?")

    def _twice(self, rival: _Caller, other: str) -> UserError:
        """That two processes have one number, which the rival is told here, and all others by who catches it."""
        error = UserError(
            f"distributed.process is {rival.greeting.number} for two processes, {other} and {rival.name}: each "
            f"needs a number of its own, and process 0 is the one at the coordinator's address."
        )
        rival.tell(f"no {error}")
        return error

    def _refused(self, greeting: JoinRequest, is_proved: bool) -> str | None:
        if not is_proved:
            return (
                f"{greeting.name} has another secret than process 0, or one of them has none; give all processes the "
                f"same distributed.token_file."
            )
        if greeting.processes != self._config.processes:
            return (
                f"{greeting.name} has distributed.processes {greeting.processes}, and process 0 has "
                f"{self._config.processes}; give all processes the same."
            )
        return None

    def _forget(self, peer: _Caller, selector: selectors.BaseSelector) -> None:
        """Lets go of a process; who came with its number takes its place."""
        selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.discard(peer)
        number = peer.greeting.number
        if self._rivals.get(number) is peer:
            del self._rivals[number]
        elif self._there.get(number) is peer:
            del self._there[number]
            if (rival := self._rivals.pop(number, None)) is not None:
                self._there[number] = rival

    def _forget_the_silent(self, selector: selectors.BaseSelector) -> None:
        """Lets go of strangers that do not say who they are, and of who does not answer while another has its number.

        A process whose host is gone, say, and that was started anew elsewhere.
        """
        now = time.monotonic()
        silent = [peer for peer in self._strangers if now - peer.last_heartbeat > _GREETING_SECONDS]
        rivals = list(self._rivals.items())
        silent += [self._there[number] for number, rival in rivals if now - rival.last_heartbeat > _GREETING_SECONDS]
        for peer in silent:
            self._forget(peer, selector)

    def _tell_all(self, line: str) -> None:
        for peer in [*self._there.values(), *self._rivals.values()]:
            peer.tell(line)


def _answered(config: DistributedConfig, token: bytes, waiting: _Waiting) -> Peer:
    """Process 0, when all are there."""
    while True:
        greeting = JoinRequest.of(config, secrets.token_hex(16))
        why = "it does not answer"
        try:
            connection = socket.create_connection(_address(config), _GREETING_SECONDS)
        except (OSError, OverflowError) as error:
            why = str(error)
        else:
            peer = Peer(connection, "process 0", time.monotonic())
            with ExitStack() as stack:
                stack.callback(connection.close)
                if _has_all(peer, greeting, config, token):
                    stack.pop_all()
                    return peer
        waiting.for_(
            f"process 0 at {config.coordinator} ({why})", f"process 0 did not answer at {config.coordinator} ({why})"
        )
        time.sleep(_RETRY_SECONDS)


def _has_all(process_0: Peer, greeting: JoinRequest, config: DistributedConfig, token: bytes) -> bool:
    """Waits until process 0 says that all are there; False if it is silent or gone, so that it may come again."""
    process_0.connection.settimeout(config.timeout_seconds)
    while (line := process_0.line(_MOST_UNREAD_BYTES)) is not None:
        word, _, rest = line.partition(" ")
        if word == "who":
            process_0.tell(greeting.line(token, rest))
        if word == "there?":
            process_0.tell("there")
        if word == "no":
            raise UserError(rest)
        if word == "late":
            raise RendezvousTimeout(rest)
        if word == "hello":
            if (name := greeting.proved(token, rest)) is None:
                raise UserError(
                    f"distributed.token_file: who answers at {config.coordinator} has another secret than this "
                    f"process; it may be another program. Give all processes the same file."
                )
            process_0.name = name
            process_0.connection.settimeout(None)
            return True
    return False


def _address(config: DistributedConfig) -> tuple[str, int]:
    host, _, port = (config.coordinator or "").rpartition(":")
    return host.strip("[]"), int(port)


def _numbered(missing: Sequence[int], processes: int) -> str:
    """Some processes in words; none is missing while one of two with one number is asked."""
    if not missing:
        return f"an answer of one of {processes} processes"
    shown = [str(number) for number in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        shown.append(f"{len(missing) - _SHOWN} more")
    numbers = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"process{'es' if len(missing) > 1 else ''} {numbers} of {processes}"
