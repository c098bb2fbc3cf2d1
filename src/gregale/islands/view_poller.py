"""The requests for views to the coordinator: only the answer to the newest one counts."""

import time
from collections.abc import Callable
from threading import Lock, Thread, current_thread

from gregale.islands.protocol.headers import NO_ROUND, Header, View, headers_of
from gregale.islands.protocol.wire import GarbageError, Packed
from gregale.islands.transport.coordinator import (
    LAST_REQUEST_SECONDS,
    CoordinatorClient,
    CoordinatorRefuses,
    CoordinatorUnreachable,
    NotAdmitted,
    RequestDropped,
)


class ViewPoller:
    """A sender of view requests, each in a thread of its own; views go to `seen`, failures to `failed`.

    A new request does not wait for the answer to the previous one, which is ignored: the coordinator drops the old
    request. Otherwise the next view would contain the outdated header of a healed member.

    - `complain`: receives one line for each unreadable member of a view, and one for a coordinator that refuses
    - `refused`: receives the reason why this island ends. Either the coordinator does not admit it, or it has no state
      but an unreadable member has one: then it would start a second fleet.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        seen: Callable[[View], None],
        failed: Callable[[str], None],
        complain: Callable[[str], None],
        refused: Callable[[str], None],
    ):
        self._coordinator = coordinator
        self._seen, self._failed, self._complain, self._refused = seen, failed, complain, refused
        self._complaints: set[str] = set()  # of the last answer
        self._has_peers = False
        self._threads: list[Thread] = []  # the newest is the last
        self._lock, self._closed = Lock(), False

    def ask(self, header: Header, needed: int) -> None:
        with self._lock:
            if self._closed:
                return
            thread = Thread(target=self._request, args=(header, needed), daemon=True, name="asking")
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def close(self) -> None:
        """Stop requesting; the coordinator notices the silence. Wait briefly for requests in progress."""
        with self._lock:
            self._closed = True
        self._coordinator.close()
        until = time.monotonic() + LAST_REQUEST_SECONDS
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _request(self, header: Header, needed: int) -> None:
        try:
            view = self._coordinator.ask(header.to_json(), needed)
        except NotAdmitted as error:
            self._refused(str(error))
        except (CoordinatorUnreachable, RequestDropped) as error:
            if self._is_newest():
                self._tell({"": str(error)} if isinstance(error, CoordinatorRefuses) else {})
                self._failed(str(error))
        else:
            if self._is_newest():
                self._answered(header, view.id, view.headers)

    def _is_newest(self) -> bool:
        """Return whether the current thread has sent the newest request."""
        with self._lock:
            return not self._closed and self._threads[-1] is current_thread()

    def _answered(self, own: Header, number: int, found: Packed) -> None:
        headers, unreadable = readable(found)
        self._has_peers |= len(headers) > 1
        has_state = any(type(value.get("round")) is int and value["round"] > NO_ROUND for _, value in unreadable)
        if has_state and own.round == NO_ROUND and not self._has_peers:
            complaint, value = unreadable[0]
            self._refused(
                f"islands: the fleet at the lighthouse {self._coordinator.address} has another version of Gregale, "
                f"{value.get('version')}, and this island {own.version}: {complaint}."
            )
        self._tell({complaint: complaint for complaint, _ in unreadable})
        self._seen(View(number, headers))

    def _tell(self, complaints: dict[str, str]) -> None:
        for kind, complaint in complaints.items():
            if kind not in self._complaints:
                self._complain(complaint)
        self._complaints = set(complaints)


def readable(found: Packed) -> tuple[tuple[Header, ...], list[tuple[str, dict]]]:
    """Return the headers that this version can read, and a complaint for each other one."""
    headers, unreadable = [], []
    for number, each in enumerate(headers_of(found)):
        if isinstance(each, GarbageError):
            value = found.unpacked(number)
            unreadable.append((f"{value.get('name')}: {each}", value))
        else:
            headers.append(each)
    return tuple(headers), unreadable
