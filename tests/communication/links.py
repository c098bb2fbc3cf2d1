"""A link between threads of one process, for members of a group that reduce together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Transfer:
    """A send and its receive: done when both are there, whichever comes first."""

    def __init__(self):
        self.done, self.lock = threading.Event(), threading.Lock()
        self.sent = self.into = None

    def meet(self, **side: np.ndarray) -> Transfer:
        with self.lock:
            for name, array in side.items():
                assert array.dtype == np.uint8
                assert array.flags.c_contiguous
                assert getattr(self, name) is None, "a tag is used once"
                setattr(self, name, array)
            if self.sent is not None and self.into is not None:
                assert self.sent.shape == self.into.shape
                np.copyto(self.into, self.sent)
                self.done.set()
        return self

    def wait(self, timeout_seconds: float) -> None:
        if not self.done.wait(timeout_seconds):
            raise TimeoutError(f"nobody came within {timeout_seconds} s")


@dataclass
class Wires:
    """All transfers of a group's reduce."""

    size: int
    transfers: dict[tuple[int, int, int], Transfer] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def transfer(self, sender: int, receiver: int, tag: int) -> Transfer:
        with self.lock:
            return self.transfers.setdefault((sender, receiver, tag), Transfer())


@dataclass
class ThreadLink:
    """One member's end; counts what it sends, and the most that it had under way."""

    wires: Wires
    rank: int
    bytes_sent: int = 0
    posted: list[Transfer] = field(default_factory=list)
    most_under_way: int = 0

    @property
    def size(self) -> int:
        return self.wires.size

    def send(self, peer: int, data: np.ndarray, tag: int) -> Transfer:
        self.bytes_sent += data.nbytes
        return self._post(self.wires.transfer(self.rank, peer, tag).meet(sent=data))

    def recv(self, peer: int, data: np.ndarray, tag: int) -> Transfer:
        return self._post(self.wires.transfer(peer, self.rank, tag).meet(into=data))

    def _post(self, transfer: Transfer) -> Transfer:
        self.posted.append(transfer)
        self.most_under_way = max(self.most_under_way, sum(not each.done.is_set() for each in self.posted))
        return transfer


def all_together(size: int, member: Callable[[ThreadLink], Any], kind: type[ThreadLink] = ThreadLink) -> list[Any]:
    """What each member of a group returns, all at once in threads of their own."""
    wires = Wires(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, [kind(wires, rank) for rank in range(size)]))
