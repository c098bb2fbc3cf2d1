"""What leads an island's trainer on one host: the `Driver` on host 0, a `Follower` on the others.

The trainers of all hosts call the same in the same order, and are told the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gregale.islands.inner import Inner
from gregale.islands.orders import Order, Pace
from gregale.islands.worker import OuterSide


class Down(NamedTuple):
    """What has come down to this host of a round's message."""

    messages: Any  # of this host's shards
    weight: float  # tokens
    norm: float | None  # root mean square of the whole; None: it is not finite


class Guide(Protocol):
    """Leads a trainer; `Driver` says more of each."""

    pace: Pace

    @property
    def side(self) -> OuterSide:
        """The outer side as it was when the last order was given: what to follow it with, and what to save."""
        ...

    @property
    def holder(self) -> str:
        """Whose leases the batches are of."""
        ...

    @property
    def undecided_steps(self) -> int:
        """Steps that no round in the parameters has in it; of host 0, which saves them."""
        ...

    def order(self, starved: bool = False) -> Order | None:
        """What to do before the next step; None: take it."""
        ...

    def take(self) -> int | None:
        """The first example of the next batch; None if there is none at the moment."""
        ...

    def stepped(self) -> None:
        """A step was handed to the device."""
        ...

    def departed(self, number: int, fetch_down: Callable[[], Down], used: int) -> None:
        """Takes the messages of a round."""
        ...

    def shown(self, inner: Inner) -> None:
        """Takes a copy of the inner optimizer for who joins."""
        ...

    def inherited(self) -> Inner | None:
        """What this host has of a peer's inner optimizer, for an order that says so; given once."""
        ...

    def used(self, batches: int) -> int:
        """Examples that so many batches of this process have passed; what is told of it is what host 0 says."""
        ...

    def leave(self) -> None:
        """Asks to go; an order `Finish` follows."""
        ...

    def close(self) -> None:
        """Ends the threads."""
        ...
