"""The connections between host 0 of an island and its other hosts: JSON over TCP, for the processes of one run only.

    host 0: door = Door("127.0.0.1", key_of(token, word)); door.address; hosts = door.hosts(count, seconds)
    others: link = connect(address, key_of(token, word), number)

A key is made of the fleet's token and of a word that this run has drawn; it never travels. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
import itertools
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import Queue
from threading import Condition, Lock, Thread
from typing import Any

from gregale.errors import UserError
from gregale.islands.engine.client import Refused

LARGEST_MESSAGE_BYTES = 64 << 20
GREETING_SECONDS = 10.0
LOST = "its connection has ended"


class HostFailed(Exception):
    """A host could not do what it was asked to; `kind`: the name of its error."""

    def __init__(self, text: str, kind: str):
        super().__init__(text)
        self.kind = kind


def key_of(token: bytes, word: str) -> bytes:
    """What the processes of one run prove to each other."""
    return hmac.digest(token, f"hosts of one island {word}".encode(), "sha256")


class Link:
    """Messages to and from another process of this run; any thread may send, one receives."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; if the other is lost, that is seen where it is received."""
        with self._lock, suppress(OSError, ValueError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the connection has ended."""
        try:
            return json.loads(self._connection.recv_bytes(LARGEST_MESSAGE_BYTES))
        except (OSError, EOFError, ValueError, TypeError):
            return None

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in `receive`."""
        with suppress(OSError), socket.socket(fileno=self._connection.fileno()) as own:
            try:
                own.shutdown(socket.SHUT_RDWR)
            finally:
                own.detach()


class Host:
    """Another host of the island, as host 0 sees it.

    - `number`: of its process
    """

    def __init__(self, link: Link, number: int):
        self.number, self._link = number, link
        self._taken: Queue[bool] = Queue()
        self._asked: dict[int, tuple[Future[dict[str, Any]], Callable[[], None]]] = {}
        self._numbers, self._lock, self._is_lost = itertools.count(), Lock(), False
        self._changed, self._shown = Condition(self._lock), -1
        Thread(target=self._listen, daemon=True, name=f"host-{number}").start()

    def tell(self, what: str, arguments: list[Any]) -> None:
        """Something to be done, in the order of the calls, that has no answer."""
        self._link.send({"do": what, "with": arguments})

    def ask(self, what: str, arguments: list[Any], failed: Callable[[], None] = lambda: None) -> Future[dict[str, Any]]:
        """Something to be done in a thread of its own; the answer, or HostFailed, comes later.

        - `failed`: called before that, in another thread
        """
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        with self._lock:
            is_lost = self._is_lost
            self._asked[number] = answer, failed
        self._link.send({"do": what, "with": arguments, "ask": number})
        if is_lost:
            self._fail(number, LOST, "")
        return answer

    def await_messages(self) -> None:
        """Waits until the host has its messages of the round whose order was given; also returns if it is lost."""
        if not self._taken.get():
            self._taken.put(False)  # for who asks next

    def await_shown(self, step: int, seconds: float) -> None:
        """Waits until the host serves its inner optimizer after that step, or a later one. Raises Refused."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost or self._shown >= step, seconds)
            if self._shown < step:
                raise Refused(f"host {self.number} has shown nothing in time")

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            if "took" in message:
                self._taken.put(True)
            elif "shown" in message:
                with self._changed:
                    self._shown = message["shown"]
                    self._changed.notify_all()
            elif "failed" in message:
                self._fail(message["ask"], message["failed"], message["kind"])
            else:
                self._asked.pop(message["ask"])[0].set_result(message)
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()
        for number in list(self._asked):
            self._fail(number, LOST, "")
        self._taken.put(False)

    def _fail(self, number: int, text: str, kind: str) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked[1]()
            asked[0].set_exception(HostFailed(f"host {self.number} of this island: {text}", kind))


class Door:
    """Where host 0 awaits the others, at an address of its own."""

    def __init__(self, bind: str, key: bytes):
        self._key = key
        try:
            self._server = socket.create_server((bind, 0))
        except OSError as error:
            raise UserError(f"islands.bind: {bind} cannot be listened at ({error.strerror}).") from None
        self.address = f"{bind}:{self._server.getsockname()[1]}"
        self._come: Queue[tuple[int, Link]] = Queue()

    def hosts(self, count: int, seconds: float) -> list[Host]:
        """The others, `count` of them, by number; raises UserError if one does not come in time."""
        until, found = time.monotonic() + seconds, {}
        with self._server:
            Thread(target=self._accept, daemon=True, name="door").start()
            while len(found) < count and (left := until - time.monotonic()) > 0:
                with suppress(Exception):
                    number, link = self._come.get(timeout=left)
                    found[number] = link
        if len(found) < count:
            raise UserError(
                f"{count - len(found)} of the island's other {count} hosts did not come to {self.address} within "
                f"{seconds:g} s: each has to reach islands.bind of process 0, and to have the same token."
            )
        return [Host(link, number) for number, link in sorted(found.items())]

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                accepted, _ = self._server.accept()
                Thread(target=self._greet, args=(accepted,), daemon=True).start()

    def _greet(self, accepted: socket.socket) -> None:
        connection = _connection(accepted)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            link = Link(connection)
            greeting = link.receive() if connection.poll(GREETING_SECONDS) else None
        except (OSError, EOFError, AuthenticationError, AssertionError):
            return  # a stranger
        if greeting is not None:
            self._come.put((greeting["host"], link))


def connect(address: str, key: bytes, number: int) -> Link:
    """The way of host `number` to host 0; raises UserError if there is none."""
    host, _, port = address.rpartition(":")
    try:
        connection = Client((host, int(port)), "AF_INET", authkey=key)
    except (OSError, EOFError, AuthenticationError) as error:
        raise UserError(
            f"host {number} of this island cannot reach host 0 at {address} ({error}): set islands.bind of process 0 "
            "to an address that its other hosts reach."
        ) from None
    with socket.socket(fileno=connection.fileno()) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.detach()
    link = Link(connection)
    link.send({"host": number})
    return link


def _connection(accepted: socket.socket) -> Connection:
    """An accepted socket, which sends small messages at once."""
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(accepted.detach())
