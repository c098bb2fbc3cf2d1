"""The thread that requests views from the coordinator, always with the newest header."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from threading import Condition, Thread, current_thread

from gregale.islands.protocol.headers import NO_ROUND, GarbageError, Header, View
from gregale.islands.transport.coordinator import (
    LAST_REQUEST_SECONDS,
    CoordinatorClient,
    CoordinatorRefuses,
    CoordinatorTimeout,
    CoordinatorUnreachable,
    NotAdmitted,
)


class ViewPoller:
    """A thread that sends one request after the other; views go to `seen`, failures to `failed`.

    A new header does not wait for the answer to the previous one. Another thread sends it, the coordinator drops the
    old request, and the old thread ends. Otherwise the next view would contain the outdated header of a healed member.

    - `seconds`: the time after which a request is abandoned
    - `complain`: receives one line for each unreadable member of a view, and one for a coordinator that refuses
    - `refused`: receives the reason why this island ends. Either the coordinator does not admit it, or it has no state
      but an unreadable member has one: then it would start a second fleet.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        seconds: float,
        seen: Callable[[View], None],
        failed: Callable[[str], None],
        complain: Callable[[str], None],
        refused: Callable[[str], None],
    ):
        self._coordinator, self._seconds = coordinator, seconds
        self._seen, self._failed, self._complain, self._refused = seen, failed, complain, refused
        self._complaints: set[str] = set()  # of the last answer
        self._has_peers = False
        self._newest: Header | None = None
        self._thread, self._asks = 0, False  # which thread requests; whether it waits for an answer
        self._started: list[Thread] = []
        self._changed, self._closed = Condition(), False

    def start(self) -> None:
        """Start to send requests, as soon as there is a header."""
        started = Thread(target=self._run, args=(self._thread,), daemon=True, name="asking")
        self._started = [each for each in self._started if each.is_alive()] + [started]
        started.start()

    def ask(self, header: Header) -> None:
        """Send this header with the next request, replacing one that is not sent yet."""
        with self._changed:
            self._newest = header
            if self._asks:
                self._thread, self._asks = self._thread + 1, False
                self.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop requesting; the coordinator notices the silence. Wait briefly for requests in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._coordinator.close()
        until = time.monotonic() + LAST_REQUEST_SECONDS
        for thread in self._started:
            if thread is not current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _run(self, thread: int) -> None:
        while (header := self._next(thread)) is not None:
            try:
                view = self._coordinator.ask(json.loads(header.to_json()), self._seconds)
            except NotAdmitted as error:
                self._refused(str(error))
                return
            except (CoordinatorUnreachable, CoordinatorTimeout) as error:
                if self._is_answered(thread):
                    self._tell({"": str(error)} if isinstance(error, CoordinatorRefuses) else {})
                    self._failed(str(error))
                continue
            if self._is_answered(thread):
                self._answered(header, view.id, view.headers)

    def _next(self, thread: int) -> Header | None:
        with self._changed:
            while self._newest is None and not self._closed and thread == self._thread:
                self._changed.wait()
            if self._closed or thread != self._thread:
                return None
            header, self._newest, self._asks = self._newest, None, True
            return header

    def _is_answered(self, thread: int) -> bool:
        """Note that the thread has an answer; return whether it belongs to the newest request."""
        with self._changed:
            if thread != self._thread:
                return False
            self._asks = False
            return True

    def _answered(self, own: Header, number: int, found: list[dict]) -> None:
        headers, unreadable = readable(found)
        self._has_peers |= len(headers) > 1
        has_state = any(type(value.get("round")) is int and value["round"] > NO_ROUND for _, value in unreadable)
        if has_state and own.round == NO_ROUND and not self._has_peers:
            self._refused(
                f"islands: the fleet at the lighthouse {self._coordinator.address} has another version of Gregale: "
                f"{unreadable[0][0]}."
            )
        self._tell({complaint: complaint for complaint, _ in unreadable})
        self._seen(View(number, headers))

    def _tell(self, complaints: dict[str, str]) -> None:
        for kind, complaint in complaints.items():
            if kind not in self._complaints:
                self._complain(complaint)
        self._complaints = set(complaints)


def readable(found: list[dict]) -> tuple[tuple[Header, ...], list[tuple[str, dict]]]:
    """Return the headers that this version can read, and a complaint for each other one."""
    headers, unreadable = [], []
    for value in found:
        try:
            headers.append(Header.from_json(json.dumps(value)))
        except GarbageError as error:
            unreadable.append((f"{value.get('name')}: {error}", value))
    return tuple(headers), unreadable
