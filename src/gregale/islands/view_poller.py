"""The requests for views to the coordinator: only the answer to the newest one counts."""

import time
from collections.abc import Callable
from dataclasses import asdict
from threading import Lock, Thread, current_thread

from gregale.islands.protocol.headers import Header, View
from gregale.islands.protocol.wire import Columns, GarbageError, decode_all, unpack
from gregale.islands.transport.client import island_at
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
    - `refused`: receives the reason why the coordinator does not admit this island, which ends
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        seen: Callable[[View], None],
        failed: Callable[[str], None],
        complain: Callable[[str], None],
        refused: Callable[[NotAdmitted], None],
    ):
        self._coordinator = coordinator
        self._seen, self._failed, self._complain, self._refused = seen, failed, complain, refused
        self._complaints: set[str] = set()  # of the last answer
        self._threads: list[Thread] = []
        self._newest: Thread | None = None  # None: its answer does not count any more
        self._lock, self._closed = Lock(), False

    def ask(self, header: Header, needed: int) -> None:
        with self._lock:
            if self._closed:
                return
            thread = Thread(target=self._request, args=(header, needed), daemon=True, name="asking")
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            self._newest = thread
            thread.start()

    def look(self) -> None:
        """Give up the request that waits for an answer, if another coordinator is chosen now."""
        if address := self._coordinator.turned_to():
            with self._lock:
                self._newest = None
            self._complain(f"requests go to the lighthouse at {address} now")
            self._failed("another coordinator is chosen")

    def close(self) -> None:
        """Stop requesting, and leave. Wait briefly for requests in progress."""
        with self._lock:
            self._closed = True
        self._coordinator.close()
        until = time.monotonic() + LAST_REQUEST_SECONDS
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _request(self, header: Header, needed: int) -> None:
        try:
            reply = self._coordinator.ask(asdict(header), needed)
        except NotAdmitted as error:
            self._refused(error)
        except (CoordinatorUnreachable, RequestDropped) as error:
            if self._is_newest():
                self._tell({"": str(error)} if isinstance(error, CoordinatorRefuses) else {})
                self._failed(str(error))
        else:
            if self._is_newest():
                self._answered(*reply)

    def _is_newest(self) -> bool:
        """Return whether the current thread has sent the newest request."""
        with self._lock:
            return not self._closed and self._newest is current_thread()

    def _answered(self, number: int, columns: Columns, stamp: int) -> None:
        found = [with_own_addresses(each) for each in decode_all(Header, columns, "header")]
        named = zip(unpack(columns, "name"), found, strict=True)
        self._tell({name: f"{name}: {error}" for name, error in named if isinstance(error, GarbageError)})
        self._seen(View(number, tuple(each for each in found if isinstance(each, Header)), stamp))

    def _tell(self, complaints: dict[str, str]) -> None:
        for kind, complaint in complaints.items():
            if kind not in self._complaints:
                self._complain(complaint)
        self._complaints = set(complaints)


def with_own_addresses(header: Header | GarbageError) -> Header | GarbageError:
    """Return the header, or an error if an address in it is another island's: its messages would go there."""
    if isinstance(header, Header) and not {island_at(host) for host in header.hosts} <= {"", header.name}:
        return GarbageError("a header has the address of another island")
    return header
