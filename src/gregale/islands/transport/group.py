"""A group of islands' hosts that exchange bytes over TLS streams.

Each member opens a stream to the server of each other member and sends on it. It receives on the streams that the
others open. So one thread writes to a TLS connection and one reads from it; OpenSSL allows no more.

A message is its tag (uint32) and size (uint64), both big-endian, and its bytes. When a stream ends, the whole group has
failed: the member closes all its streams, so that every other member notices at once.
"""

import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from socket import socket

import numpy as np

from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, fill
from gregale.islands.transport.server import Server
from gregale.islands.transport.tls import check_peer, shut
from gregale.islands.transport.transfer import bytes_of

MESSAGE_HEAD = struct.Struct("!IQ")
RETRY_SECONDS = 0.1
DROP_SECONDS = 5.0  # for threads to notice that their streams are closed


class GroupFailed(Exception):
    """A member of the group died, was cut off, dropped the group, or did not answer in time."""


class Work:
    """A message in progress. Neither change nor free the array until `wait` has returned or raised."""

    def __init__(self, group: "Group", array: np.ndarray, tag: int, what: str):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        self.content, self.tag = bytes_of(array), tag
        self._group, self._what = group, what
        self._ended, self._is_done = threading.Event(), False

    def wait(self, timeout_seconds: float) -> None:
        """Return when the message has arrived (or was sent); raise GroupFailed, also after the timeout.

        The group cannot be used after an error.
        """
        if not self._ended.wait(timeout_seconds):
            self._group.fail(f"{self._what} took more than {timeout_seconds:g} s")
        if not self._is_done:
            raise GroupFailed(self._group.failure)

    def finish(self, is_done: bool) -> None:
        """Record the end, once."""
        if not self._ended.is_set():
            self._is_done = is_done
            self._ended.set()


@dataclass
class Count:
    sent: int = 0
    received: int = 0


class Group:
    """Members `0 .. size - 1` that can send to each other: the link of a reducer. Call `connect` first.

    - `failure`: why it cannot be used any more, or empty
    - `count`: of the bytes of its messages
    """

    def __init__(self, key: str, rank: int, hosts: Sequence[str], server: Server, names: Sequence[str] = ()):
        """Announce the group of a key to the own server.

        - `key`: never used before by another group, even a failed one (hash it with the view's `instant`)
        - `hosts`: addresses of the members' servers in the order of ranks, including the own one
        - `names`: the members' names in messages; default: their addresses
        """
        self.rank, self.size, self.failure, self.count = rank, len(hosts), "", Count()
        self._key, self._server = key, server
        self._names = list(names) or [host.partition("/")[0] for host in hosts]
        self._hosts = {peer: host for peer, host in enumerate(hosts) if peer != rank}
        self._changed = threading.Condition()
        self._streams: dict[tuple[str, int], socket] = {}  # by direction and peer
        self._faults: dict[int, str] = {}  # of the latest try to open a stream, by peer
        self._outgoing: dict[int, SimpleQueue[Work | None]] = {peer: SimpleQueue() for peer in self._hosts}
        self._incoming: dict[tuple[int, int], deque[Work]] = defaultdict(deque)  # by peer and tag
        self._works: set[Work] = set()  # in progress
        server.groups.add(key, self.receive)

    def connect(self, timeout_seconds: float) -> None:
        """Open the streams; all members must do so within the timeout. Raises GroupFailed, and drops the group then."""
        deadline = time.monotonic() + timeout_seconds
        for peer in self._hosts:
            threading.Thread(
                target=self._send_to, args=(peer, deadline), name=f"gregale-group-{peer}", daemon=True
            ).start()
        wanted = {(direction, peer) for direction in ("to", "from") for peer in self._hosts}
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._streams.keys() == wanted, timeout_seconds)
            missing = sorted(peer for _, peer in wanted - self._streams.keys())
        if missing:
            self.fail(f"{self._names[missing[0]]} did not come within {timeout_seconds:g} s")
        if self.failure:
            self.drop()
            # A member that gives up earlier ends its connections: those are not the cause.
            reason = next((self._faults[peer] for peer in missing if peer in self._faults), self.failure)
            raise GroupFailed(f"The group of {self.size} has not come together: {reason}")

    def send(self, peer: int, data: np.ndarray, tag: int = 0) -> Work:
        """Send a contiguous uint8 array to a member. Messages of one tag arrive in order. Raises GroupFailed."""
        self.count.sent += data.nbytes
        work = Work(self, data, tag, f"sending to {self._names[peer]}")
        with self._begun(work):
            self._outgoing[peer].put(work)
        return work

    def recv(self, peer: int, data: np.ndarray, tag: int = 0) -> Work:
        """Receive exactly `data.size` bytes into a contiguous, writable uint8 array. Raises GroupFailed.

        A message that is not awaited yet stops the messages behind it.
        """
        assert data.flags.writeable
        self.count.received += data.nbytes
        work = Work(self, data, tag, f"receiving from {self._names[peer]}")
        with self._begun(work):
            self._incoming[peer, tag].append(work)
            self._changed.notify_all()
        return work

    def streams(self) -> tuple[list[socket], list[socket]]:
        """Return the connections on which this member sends, and those on which it receives."""
        with self._changed:
            found = dict(self._streams)
        to, others = ([each for (name, _), each in found.items() if name == kind] for kind in ("to", "from"))
        return to, others

    def drop(self) -> None:
        """Close the streams, so that every other member's waits fail at once. Safe from any thread, and twice.

        Waits in progress in this process fail too. A group that has not failed is dropped when all its members are
        known to have finished with it.
        """
        self.fail("the group was dropped here")
        with self._changed:
            self._changed.wait_for(lambda: not self._streams, DROP_SECONDS)

    def fail(self, reason: str) -> None:
        """Record the first reason, and end the streams."""
        with self._changed:
            if self.failure:
                return
            self.failure = reason
            works, self._works = self._works, set()
            streams = list(self._streams.values())
            self._changed.notify_all()
        self._server.groups.remove(self._key)
        for stream in streams:
            shut(stream)
        for queue in self._outgoing.values():
            queue.put(None)
        for work in works:
            work.finish(False)

    def receive(self, peer: int, stream: socket) -> None:
        """Receive a member's messages from the stream that it has opened, until the group ends. The server calls it.

        Raises PeerRefused if the stream is not the member's.
        """
        head = bytearray(MESSAGE_HEAD.size)

        def receive_all() -> None:
            while True:
                fill(memoryview(head), stream.recv_into)
                tag, size = MESSAGE_HEAD.unpack(head)
                work = self._awaited(peer, tag)
                if size != len(work.content):
                    self.fail(f"{self._names[peer]} sends {size} bytes where {len(work.content)} are expected")
                    return
                fill(work.content, stream.recv_into)
                self._finish(work)

        if peer in self._hosts:
            check_peer(self._server.token, stream, self._names[peer])
            self._use(stream, ("from", peer), receive_all)

    def _send_to(self, peer: int, deadline: float) -> None:
        """Open the stream to a member, and send the messages to it until the group ends."""
        stream = self._opened(peer, deadline)
        if stream is None:
            return

        def send_all() -> None:
            while (work := self._outgoing[peer].get()) is not None:
                stream.sendall(MESSAGE_HEAD.pack(work.tag, len(work.content)))
                if work.content:
                    stream.sendall(work.content)
                self._finish(work)

        with closing(stream):
            self._use(stream, ("to", peer), send_all)

    def _opened(self, peer: int, deadline: float) -> socket | None:
        """Return a stream to a member, whose server has found its group; None if the group has failed meanwhile."""
        dial = self._server.paths.dial
        while not self.failure:
            # More than is left, so that `connect` is the first to give up.
            seconds = max(deadline - time.monotonic(), 0) + 1.0
            try:
                with closing(PeerClient(self._hosts[peer], self._server.token, seconds, dial)) as client:
                    return client.open_stream({"group": self._key, "rank": self.rank, "seconds": seconds}, seconds)
            except (PeerUnreachable, RequestRejected) as error:
                name, text = self._names[peer], str(error)
                self._faults[peer] = text if text.startswith(name) else f"{name}: {text}"
            with self._changed:
                self._changed.wait_for(lambda: self.failure, RETRY_SECONDS)
        return None

    def _use(self, stream: socket, name: tuple[str, int], run: Callable[[], None]) -> None:
        """Run `run`, which uses a stream until it ends; then the group has failed."""
        with self._changed:
            if self.failure or name in self._streams:
                return
            self._streams[name] = stream
            self._changed.notify_all()
        with suppress(OSError):
            run()
        self.fail(f"the connection to {self._names[name[1]]} has ended")
        with self._changed:
            del self._streams[name]
            self._changed.notify_all()

    @contextmanager
    def _begun(self, work: Work) -> Iterator[None]:
        with self._changed:
            if self.failure:
                raise GroupFailed(self.failure)
            self._works.add(work)
            yield

    def _awaited(self, peer: int, tag: int) -> Work:
        """Return the next work that waits for a message of this tag; wait for it. Raises OSError if the group fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._incoming[peer, tag])
            if self.failure:
                raise ConnectionAbortedError
            return self._incoming[peer, tag].popleft()

    def _finish(self, work: Work) -> None:
        with self._changed:
            self._works.discard(work)
        work.finish(True)
