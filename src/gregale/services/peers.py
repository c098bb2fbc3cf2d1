"""Noticing that another process of a run is lost: killed, stopped, or out of reach.

The processes wait for one another inside of compiled programs, where a lost one means waiting for ever, or an error of
the transport that names nobody. So each has a thread that hears from process 0, and process 0 hears from each, over a
TCP connection of their own. A connection that closes, or over which nothing comes for `distributed.timeout_seconds`, is
a lost process: all others say which it was and end with an exit code that tells a scheduler to start the job again. If
one ends with an error of its own, the others end a while later with exit code 1.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread

import jax

from gregale.errors import UserError
from gregale.services.checkpoint.processes import first_message
from gregale.services.config import AUTO, DistributedConfig
from gregale.streams import LastingStream

EXIT_CODE = os.EX_TEMPFAIL
_BEATS = 6  # signs of life in the time after which a process is lost
_GREETING_SECONDS = 5.0
_VERDICT_SECONDS = 3.0


@dataclass
class Peer:
    """The process at the other end of a connection.

    Attributes:
        name: its number, host and pid, in words.
        heard: when it last gave a sign of life.
        is_done: whether it has come to the end of the run.
        ended: when it said that it ends with an error; None if it did not.
    """

    connection: socket.socket
    name: str
    heard: float
    is_done: bool = False
    ended: float | None = None
    unread: bytes = field(default=b"", repr=False)

    def tell(self, line: str) -> None:
        """Sends a line; whether it arrives is seen elsewhere."""
        with suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())

    def lines(self) -> list[str] | None:
        """What it has said, None if the connection is closed."""
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        *whole, self.unread = (self.unread + received).split(b"\n")
        return [line.decode(errors="replace") for line in whole] if received else None


class Watch(Thread):
    """Hears from the peers of a process: process 0 has all others for its peers, each of the others has process 0."""

    def __init__(self, peers: Sequence[Peer], timeout_seconds: float, is_first: bool, where: Callable[[], str]):
        """
        Args:
            peers: those that are connected.
            timeout_seconds: silence after which one is lost.
            is_first: whether this is process 0.
            where: says where the run would go on.
        """
        super().__init__(daemon=True, name="peers")
        self._peers, self._timeout, self._is_first, self._where = peers, timeout_seconds, is_first, where
        self._beat = timeout_seconds / _BEATS
        self._may_leave = self._has_failed = False
        self._said_so = Event()

    def leave(self) -> None:
        """Waits until all processes have come to the end of the run."""
        self._may_leave = True
        self.join()

    def fail(self, code: int) -> None:
        """Tells the others that this process ends with an error of its own; they may be about to, too.

        JAX would wait for them when Python exits, and abort if they do not come; so this process exits without that.
        """
        self._has_failed = True
        self._said_so.wait()
        atexit.register(_exit_at_once, code)

    def await_verdict(self) -> None:
        """Gives the thread the time to find out whether an error of this process is the loss of another."""
        time.sleep(_VERDICT_SECONDS)
        while any(time.monotonic() - peer.heard > 2 * self._beat for peer in self._peers):
            time.sleep(self._beat / 4)

    def run(self) -> None:
        said = 0.0
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while not self._is_over():
                for key, _ in selector.select(self._beat / 4):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() - said >= self._beat:
                    said = time.monotonic()
                    for peer in self._peers:
                        peer.tell("alive")
                self._check()

    def _is_over(self) -> bool:
        if self._has_failed and not self._said_so.is_set():
            for peer in self._peers:
                peer.tell("failed")
            self._said_so.set()
        if not self._may_leave:
            return False
        are_all_done = all(peer.is_done for peer in self._peers)
        if are_all_done or not self._is_first:  # process 0 is the last to say so
            for peer in self._peers:
                peer.tell("done")
        return are_all_done

    def _hear(self, peer: Peer) -> bool:
        """Takes what a peer has said; returns whether it may say more."""
        lines = peer.lines()
        if lines is None:
            if peer.ended is None and not peer.is_done:
                self._end(EXIT_CODE, f"{peer.name} was lost: its connection closed.", peer)
            return False
        peer.heard = time.monotonic()
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "end":
                code, _, text = rest.partition(" ")
                self._end(int(code), text, peer)
            peer.is_done |= word == "done"
            if word == "failed":
                peer.ended = peer.heard
        return True

    def _check(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if peer.ended is not None and now - peer.ended > self._timeout:
                text = f"{peer.name} ended with an error {self._timeout:g} s ago; its own output says which."
                self._end(1, text, peer)
            if peer.ended is None and not peer.is_done and now - peer.heard > self._timeout:
                self._end(EXIT_CODE, f"{peer.name} was lost: no sign of life for {self._timeout:g} s.", peer)

    def _end(self, code: int, text: str, of: Peer) -> None:
        """Ends this process, whose other threads may wait for ever, after telling the other peers why."""
        if self._has_failed:  # it ends anyway, and has its own reason
            return
        others = [peer for peer in self._peers if peer is not of]
        for peer in others:
            peer.tell(f"end {code} {text}")
        with suppress(OSError):
            os.write(2, f"gregale: error: {text} {self._where()}\n".encode())
        for peer in others:  # a connection that closes with something unread in it would take the message back
            with suppress(OSError):
                peer.connection.settimeout(1.0)
                while peer.connection.recv(1 << 16):
                    pass
        os._exit(code)


@contextmanager
def watched(config: DistributedConfig, where: Callable[[], str]) -> Iterator[None]:
    """Ends this process if another one of the run is lost while the block runs; nothing happens if there is no other.

    All processes leave the block together, unless by an exception.

    - `where`: says where the run would go on, in a sentence
    """
    if jax.process_count() == 1:
        yield
        return
    watch = Watch(_connected(config), config.timeout_seconds, jax.process_index() == 0, where)
    watch.start()
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        watch.fail(2 if isinstance(error, UserError) else 130)
        raise
    except BaseException:
        watch.await_verdict()
        watch.fail(1)
        raise
    watch.leave()


def _exit_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        LastingStream(stream).flush()
    os._exit(code)


def _connected(config: DistributedConfig) -> list[Peer]:
    """Connects process 0 with each of the others; one that cannot be reached is not watched."""
    if jax.process_index() > 0:
        host, port, token = (first_message(None) or "").split()
        try:
            connection = socket.create_connection((host, int(port)), config.timeout_seconds)
        except OSError as error:
            _say(f"process 0 is not watched, it cannot be reached at {host}:{port} ({error})")
            return []
        me = Peer(connection, "", 0.0)
        me.tell(f"{token} {jax.process_index()} {os.getpid()} {socket.gethostname()}")
        peer = _greeted(connection, "hello")
        return [peer] if peer else []
    token = secrets.token_hex(8)
    host = (config.coordinator or AUTO).rpartition(":")[0].strip("[]") or socket.gethostbyname(socket.gethostname())
    with socket.create_server(("", 0), backlog=jax.process_count()) as server:
        first_message(f"{host} {server.getsockname()[1]} {token}")
        return _accepted(server, token, config.timeout_seconds)


def _accepted(server: socket.socket, token: str, timeout_seconds: float) -> list[Peer]:
    peers: list[Peer] = []
    until = time.monotonic() + timeout_seconds
    while len(peers) < jax.process_count() - 1 and (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        with suppress(TimeoutError):
            connection, _ = server.accept()
            if peer := _greeted(connection, token):
                peer.tell(f"hello 0 {os.getpid()} {socket.gethostname()}")
                peers.append(peer)
    if missing := jax.process_count() - 1 - len(peers):
        _say(f"{missing} processes are not watched, they could not connect")
    return peers


def _greeted(connection: socket.socket, word: str) -> Peer | None:
    """Who is at the other end, by its first line: the word, a number, a pid and a host; None if it says another."""
    connection.settimeout(_GREETING_SECONDS)
    peer = Peer(connection, "", time.monotonic())
    said = peer.lines() or [""]
    found, number, pid, host = (*said[0].split(), "", "", "", "")[:4]
    if found != word:
        connection.close()
        return None
    connection.settimeout(None)
    peer.name = f"process {number} ({host}, pid {pid})"
    return peer


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"gregale: {text}; if one is lost, the others may wait for long.\n".encode())
