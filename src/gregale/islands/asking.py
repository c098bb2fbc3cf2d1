"""Asking the coordinator, one ask after the other, always with the newest header."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Condition, Thread

from gregale.islands.engine.coordinator import Coordinator, CoordinatorUnreachable, NoAnswer
from gregale.islands.protocol.headers import GarbageError, Header, View


class Asking:
    """A thread that asks; answers go to `seen`, failures to `failed`.

    - `seconds`: after which an ask is given up
    - `complain`: gets a line for each member of a view that cannot be read, once
    - `refused`: gets the reason if nobody in the first view with others can be read: they have another token or another
      version, so that this island would begin a fleet of its own beside theirs
    """

    def __init__(
        self,
        coordinator: Coordinator,
        seconds: float,
        seen: Callable[[View], None],
        failed: Callable[[str], None],
        complain: Callable[[str], None],
        refused: Callable[[str], None],
    ):
        self._coordinator, self._seconds = coordinator, seconds
        self._seen, self._failed, self._complain, self._refused = seen, failed, complain, refused
        self._complaints: set[str] = set()  # of the last view
        self._has_peers = False
        self._newest: Header | None = None
        self._changed, self._closed = Condition(), False

    def start(self) -> None:
        """Begins to ask, as soon as there is a header."""
        Thread(target=self._run, daemon=True, name="asking").start()

    def ask(self, header: Header) -> None:
        """Asks with this header next; one that waits to be asked with is forgotten."""
        with self._changed:
            self._newest = header
            self._changed.notify()

    def close(self) -> None:
        """Asks no more; the coordinator finds that this member is silent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._coordinator.close()

    def _run(self) -> None:
        while (header := self._next()) is not None:
            try:
                view = self._coordinator.ask(json.loads(header.to_json()), self._seconds)
            except (CoordinatorUnreachable, NoAnswer) as error:
                if not self._is_past():
                    self._failed(str(error))
                continue
            if self._is_past():
                continue
            headers, complaints = readable(view.headers)
            self._tell([*view.complaints, *complaints], len(headers))
            self._seen(View(view.id, headers))

    def _tell(self, complaints: list[str], readable: int) -> None:
        self._has_peers |= readable > 1
        if complaints and not self._has_peers:
            self._refused(
                f"islands: none of the others at the lighthouse {self._coordinator.address} ({len(complaints)}) is of "
                f"this island's fleet. {complaints[0]} See that the token and Gregale's version are the same."
            )
        for complaint in complaints:
            if complaint not in self._complaints:
                self._complain(complaint)
        self._complaints = set(complaints)

    def _is_past(self) -> bool:
        """Whether the header that was asked with is no longer true: a newer one waits."""
        with self._changed:
            return self._newest is not None

    def _next(self) -> Header | None:
        with self._changed:
            while self._newest is None and not self._closed:
                self._changed.wait()
            header, self._newest = self._newest, None
            return None if self._closed else header


def readable(found: list[dict]) -> tuple[tuple[Header, ...], list[str]]:
    """The headers that this version can read, and a line for each other."""
    headers, complaints = [], []
    for value in found:
        try:
            headers.append(Header.from_json(json.dumps(value)))
        except GarbageError as error:
            complaints.append(f"{value.get('name', 'a member')}: {error}")
    return tuple(headers), complaints
