"""How the processes of one island meet, and what they tell each other before the fleet hears of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

import jax

from gregale.errors import UserError
from gregale.islands.follower import Follower
from gregale.islands.hands import Hands
from gregale.islands.hosts import Door, connect, key_of
from gregale.islands.orders import Pace
from gregale.islands.worker import Worker
from gregale.services.checkpoint.processes import first_message

T = TypeVar("T")


def hands_of(worker: Worker, token: bytes, seconds: float, wants_inner: bool) -> Hands:
    """The hosts of this island, in process 0; `followed` is what the others call at the same time."""
    if jax.process_count() == 1:
        return Hands(worker, wants_inner=wants_inner)
    word = secrets.token_hex(16)
    door = Door(worker.server.host, key_of(token, word))
    first_message(f"{door.address} {word}")
    return Hands(worker, door.hosts(jax.process_count() - 1, seconds), wants_inner)


def followed(worker: Worker, token: bytes, pace: Pace) -> Follower:
    """This host in the hands of process 0."""
    address, word = (first_message(None) or "").split()
    return Follower(worker, connect(address, key_of(token, word), worker.host), pace)


def by_all(action: Callable[[], T]) -> T:
    """What `action` returns in this process, if it fails in none; raises `UserError` in all if it does in one."""
    done, failed = None, None
    try:
        done = action()
    except UserError as error:
        failed = str(error)
    if failed := first_message(failed):
        raise UserError(failed)
    assert done is not None
    return done
