"""The connection between host 0 of an island and its other hosts, over host 0's server.

A host polls for commands that it does not have, and both sides number their messages. So each message arrives once and
in order, even after broken connections. If a process is lost, `gregale.distributed.liveness` ends the others.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Lock
from typing import Any

from gregale.distributed.rendezvous import canonical
from gregale.errors import UserError
from gregale.islands.host_worker import DigestMismatch, NotFinite
from gregale.islands.transport.client import PeerClient, PeerUnreachable, RequestRejected, ask_status, island_at
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.transfer import TransferFailed

LARGEST_REPLY_BYTES = 64 << 20
ASK_SECONDS = 20.0  # for which host 0 holds a request while it has no command
REACH_SECONDS, RETRY_SECONDS, CLOSE_SECONDS = 10.0, 0.1, 2.0


ERRORS = {kind.__name__: kind for kind in (GroupFailed, NotFinite, TransferFailed, DigestMismatch)}


class RemoteHost:
    """Another host of the island, as seen from host 0; `number`: the process index of the host."""

    def __init__(self, number: int):
        self.number, self._changed = number, Condition()
        self._queue: list[dict[str, Any]] = []  # commands that the host may not have received
        self._acknowledged = 0  # the number of commands before those
        self._received = 0  # the number of messages received from the host
        self._message_count, self._copied_step, self._is_closed = 0, -1, False
        self._answers: dict[int, tuple[Future[dict[str, Any]], Callable[[], None]]] = {}
        self._numbers = itertools.count()

    def send(self, command: str, arguments: list[Any], **more: Any) -> None:
        """Queue a command that has no answer; commands run in call order."""
        with self._changed:
            self._queue.append({"do": command, "with": arguments, **more})
            self._changed.notify_all()

    def request(
        self, command: str, arguments: list[Any], failed: Callable[[], None] = lambda: None
    ) -> Future[dict[str, Any]]:
        """Queue a command that the host runs in its own thread; the future receives the answer or the error.

        - `failed`: called in another thread before the future fails
        """
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        self._answers[number] = answer, failed
        self.send(command, arguments, ask=number)
        return answer

    def await_messages(self) -> None:
        """Wait until the host has its messages of the round that was requested."""
        with self._changed:
            self._changed.wait_for(lambda: self._message_count or self._is_closed)
            self._message_count -= 1

    def await_copy(self, step: int, seconds: float) -> None:
        """Wait until the host serves its inner optimizer after step `step` or later. Raises RequestRejected."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._copied_step >= step, seconds):
                raise RequestRejected(f"host {self.number} has not copied its inner optimizer in time")

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return commands that the host does not have, waiting for one; or handle the host's message."""
        if "have" in message:
            return {"told": self._after(message["have"])}
        with self._changed:
            if message["number"] != self._received:  # a duplicate: the reply was lost
                return {}
            self._received += 1
            self._message_count += "took" in message
            self._copied_step = message.get("shown", self._copied_step)
            self._changed.notify_all()
        if "ask" in message:
            answer, failed = self._answers.pop(message["ask"])
            if "failed" in message:
                failed()
                text = f"host {self.number} of this island: {message['failed']}"
                answer.set_exception(ERRORS[message["error"]](text))
            else:
                answer.set_result(message)
        return {}

    def close(self) -> None:
        """Wait until the host has all commands, then release every waiting thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, CLOSE_SECONDS)
            self._is_closed = True
            self._changed.notify_all()

    def _after(self, have: int) -> list[dict[str, Any]]:
        with self._changed:
            del self._queue[: max(have - self._acknowledged, 0)]
            self._acknowledged = max(have, self._acknowledged)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._is_closed, ASK_SECONDS)
            return list(self._queue) if have == self._acknowledged else []


class HostConnection:
    """The connection of host `number` to host 0; any thread may send, one receives. Raises UserError if it fails."""

    def __init__(self, address: str, token: bytes, number: int):
        self._address, self._token, self._number = address, token, number
        self._sent, self._count, self._lock, self._is_closed = 0, 0, Lock(), False
        self._sends, self._receives = (PeerClient(address, token, REACH_SECONDS) for _ in range(2))
        try:
            ask_status(address, token, REACH_SECONDS)
        except (PeerUnreachable, RequestRejected) as error:
            raise UserError(
                f"host {number} of this island cannot reach host 0 ({error}): set islands.bind of process 0 to an "
                "address that its other hosts reach, and give all of them the same token."
            ) from None

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._request(self._sends, {"number": self._sent, **message}, REACH_SECONDS)
            self._sent += 1

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the next commands, possibly none; None after `close`."""
        commands = self._request(self._receives, {"have": self._count}, ASK_SECONDS + REACH_SECONDS).get("told", [])
        self._count += len(commands)
        if self._is_closed:
            self._receives.close()
            return None
        return commands

    def close(self) -> None:
        """Close the connection: nothing is sent or received any more."""
        self._is_closed = True
        with self._lock:
            self._sends.close()

    def _request(self, peer: PeerClient, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        body = canonical({"kind": "host", "name": island_at(self._address), "host": self._number, **message})
        while not self._is_closed:
            try:
                return peer.request("POST", "/message", body, LARGEST_REPLY_BYTES, seconds)
            except (PeerUnreachable, RequestRejected):
                time.sleep(RETRY_SECONDS)
        return {}
