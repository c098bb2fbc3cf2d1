"""The coordinator: who is there, and one answer for all of them. It is torchft's Lighthouse, run and asked from here.

lighthouse = serve("127.0.0.1:29510", minimum=1, join_timeout_seconds=2.0, heartbeat_seconds=5.0)
coordinator = Coordinator(lighthouse.address, "oslo", token, heartbeat_seconds=5.0)
view = coordinator.ask({"session": "9f31", "round": 4}, timeout_seconds=30.0)
view.id, view.instant, view.headers, view.complaints
coordinator.close()
lighthouse.close()
"""

from __future__ import annotations

from typing import NamedTuple


class CoordinatorUnreachable(Exception):
    """Nobody listens at the coordinator's address, or the connection broke; asking again makes a new connection."""


class NoAnswer(Exception):
    """The coordinator lives, but has not answered within the time: others were waited for."""


class View(NamedTuple):
    """What the coordinator answered: the same for all that are in it.

    - `id`: counts up when the *membership* changes, not with each answer; from 1 again after a restart
    - `instant`: nanoseconds of the coordinator's clock when it answered: with `id` it names one answer
    - `headers`: of all members with a good signature, sorted by `name`
    - `complaints`: one line for each member that was left out, and why
    """

    id: int
    instant: int
    headers: list[dict]
    complaints: list[str]


class Lighthouse:
    """A running coordinator. `address` is `host:port` for `Coordinator`."""

    address: str

    def close(self) -> None: ...


def serve(
    bind: str,
    minimum: int,
    join_timeout_seconds: float,
    heartbeat_seconds: float,
    tick_seconds: float = 0.05,
) -> Lighthouse:
    """Starts a coordinator in threads of this process that listens at `bind` (`host:port`; port 0: any).

    - `minimum`: fewer members get no answer
    - `join_timeout_seconds`: how long the first to ask waits for those that are alive and have not asked
    - `heartbeat_seconds`: a member that has not been heard of for so long is out

    Raises UserError where the address cannot be had, and without the extra `islands`.
    """
    raise NotImplementedError


class Coordinator:
    """A member's line to the coordinator: beats in a thread from the start until `close`, reconnects on its own.

    `name` is the member's, one per fleet: a process that starts again takes its place at once.
    """

    def __init__(self, address: str, name: str, token: bytes, heartbeat_seconds: float): ...

    def ask(self, header: dict, timeout_seconds: float) -> View:
        """Sends this member's header (JSON; `name` is added) and waits for the view.

        Raises CoordinatorUnreachable or NoAnswer; both may be tried again. Only one thread may ask at a time.
        """
        raise NotImplementedError

    @property
    def last_heard_seconds(self) -> float:
        """How long ago the coordinator last took a heartbeat."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops beating: the others see this member go after `heartbeat_seconds`."""
