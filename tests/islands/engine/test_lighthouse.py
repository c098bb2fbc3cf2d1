"""What the real coordinator answers: the table in `coordinator.py`. The simulator's model has to be able to as well.

Times: the join timeout is 0.6 s and a heartbeat lasts 1.5 s; nothing is asserted that a busy machine breaks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from gregale.errors import UserError
from gregale.islands.engine.coordinator import Coordinator, CoordinatorUnreachable, NoAnswer, View, serve

TOKEN = b"a token of the fleet"
JOIN_SECONDS, HEARTBEAT_SECONDS = 0.6, 1.5
ARRIVES_SECONDS = 0.3  # the coordinator cannot be asked who waits


class Fleet:
    """A coordinator of its own, and members whose requests run in threads."""

    def __init__(self):
        self.lighthouse = serve("127.0.0.1:0", 1, JOIN_SECONDS, HEARTBEAT_SECONDS, tick_seconds=0.02)
        self.members: dict[str, Coordinator] = {}
        self.threads = ThreadPoolExecutor(16)

    def join(self, *names: str) -> None:
        """Members that beat; returns when the coordinator has heard of each."""
        for name in names:
            self.members[name] = Coordinator(self.lighthouse.address, name, TOKEN, HEARTBEAT_SECONDS)
        made = time.monotonic()
        while any(time.monotonic() - self.members[name].last_heard_seconds <= made for name in names):
            time.sleep(0.02)

    def ask(self, name: str, x: int = 0, seconds: float = 10.0) -> Future[View]:
        return self.threads.submit(self.members[name].ask, {"x": x}, seconds)

    def ask_all(self, names: str, x: int = 0) -> list[View]:
        """All ask at nearly the same time."""
        return [asked.result() for asked in [self.ask(name, x) for name in names]]

    def stop(self, name: str) -> None:
        self.members.pop(name).close()

    def end(self) -> None:
        for name in list(self.members):
            self.stop(name)
        self.lighthouse.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


def seen(view: View) -> list[tuple[str, int]]:
    return [(header["name"], header["x"]) for header in view.headers]


def test_all_get_the_same_view_with_everybodys_header(fleet):
    fleet.join("a", "b", "c")
    first = fleet.ask_all("abc", 1)
    assert first[0] == first[1] == first[2]
    assert seen(first[0]) == [("a", 1), ("b", 1), ("c", 1)]
    # The id counts members' changes, not answers: the instant tells two views of the same members apart.
    second = fleet.ask_all("abc", 2)
    assert second[0].id == first[0].id
    assert second[0].instant > first[0].instant


def test_a_large_header_arrives(fleet):
    fleet.join("a")
    header = {"text": "x" * 100_000, "nested": {"list": [1, None, "é", 2.5]}}
    assert fleet.members["a"].ask(header, 5.0).headers == [{**header, "name": "a"}]


def test_one_that_lives_and_does_not_ask_is_waited_for(fleet):
    fleet.join("a", "b", "c")
    assert len(fleet.ask_all("abc")[0].headers) == 3
    begin = time.monotonic()
    left_out = fleet.ask_all("ab", 2)
    assert time.monotonic() - begin >= JOIN_SECONDS
    assert seen(left_out[0]) == [("a", 2), ("b", 2)]
    # It is in the next view for which its request is there in time; the id counts up each time.
    waiting = fleet.ask("c", 3)
    time.sleep(ARRIVES_SECONDS)
    back = fleet.ask_all("ab", 3)
    assert seen(back[0]) == [("a", 3), ("b", 3), ("c", 3)]
    assert waiting.result() == back[0]
    assert back[0].id == left_out[0].id + 1


def test_a_lone_member_is_answered_alone_at_once(fleet):
    fleet.join("a")
    alone = fleet.ask("a", 1).result()
    fleet.join("b")
    assert seen(fleet.ask("a", 2).result()) == [("a", 2)]
    newcomer = fleet.ask("b", 3)
    time.sleep(ARRIVES_SECONDS)
    both = fleet.ask("a", 3).result()
    assert seen(both) == [("a", 3), ("b", 3)]
    assert newcomer.result() == both
    assert both.id == alone.id + 1


def test_half_of_the_living_get_no_answer(fleet):
    fleet.join("a", "b")
    fleet.ask_all("ab")
    with pytest.raises(NoAnswer, match=r"has not answered in time"):
        fleet.ask("a", 1, seconds=2 * JOIN_SECONDS).result()
    # What was given up is still pending there: the next view has the header that nobody waits with any more.
    assert seen(fleet.ask("b", 2).result()) == [("a", 1), ("b", 2)]


def test_of_two_requests_of_a_name_the_newer_counts(fleet):
    fleet.join("a", "b")
    fleet.ask_all("ab")
    fleet.members["a2"] = Coordinator(fleet.lighthouse.address, "a", TOKEN, HEARTBEAT_SECONDS)
    older = fleet.ask("a", 1)
    time.sleep(ARRIVES_SECONDS)
    newer = fleet.ask("a2", 2)
    time.sleep(ARRIVES_SECONDS)
    assert seen(fleet.ask("b", 3).result()) == [("a", 2), ("b", 3)]
    assert older.result() == newer.result()


def test_the_dead_count_until_their_heartbeat_lapses(fleet):
    fleet.join("a", "b")
    fleet.ask_all("ab")
    begin = time.monotonic()
    fleet.stop("b")
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    assert time.monotonic() - begin > HEARTBEAT_SECONDS / 2


def test_a_request_without_heartbeats_lapses(fleet):
    fleet.join("a", "b")
    fleet.ask_all("ab")
    silent = fleet.members["b"]
    silent.close()
    waiting = fleet.threads.submit(silent.ask, {"x": 1}, 3 * HEARTBEAT_SECONDS)
    time.sleep(2 * HEARTBEAT_SECONDS)
    assert seen(fleet.ask("a", 2).result()) == [("a", 2)]
    with pytest.raises(NoAnswer):
        waiting.result()


def test_a_coordinator_that_starts_again_counts_from_one(fleet):
    fleet.join("a", "b", "c")
    fleet.ask_all("abc")
    fleet.ask_all("ab")
    waiting = fleet.ask("a")
    time.sleep(ARRIVES_SECONDS)
    fleet.lighthouse.close()
    with pytest.raises(CoordinatorUnreachable, match=r"cannot be reached"):
        waiting.result()
    with pytest.raises(CoordinatorUnreachable, match=fleet.lighthouse.address):
        fleet.members["b"].ask({"x": 0}, 5.0)
    time.sleep(2 * HEARTBEAT_SECONDS / 5)
    assert fleet.members["a"].last_heard_seconds > HEARTBEAT_SECONDS / 5  # two heartbeats were not taken
    fleet.lighthouse = serve(fleet.lighthouse.address, 3, JOIN_SECONDS, HEARTBEAT_SECONDS)
    views = fleet.ask_all("abc", 5)
    assert views[0] == views[1] == views[2]
    assert views[0].id == 1


def test_members_without_the_token_are_left_out_and_named(fleet):
    fleet.lighthouse.close()
    fleet.lighthouse = serve(
        "127.0.0.1:0", 4, JOIN_SECONDS, HEARTBEAT_SECONDS
    )  # nobody is answered before all four ask
    fleet.join("a", "c", "d")
    fleet.members["b"] = Coordinator(fleet.lighthouse.address, "b", b"another token here", HEARTBEAT_SECONDS)
    timeout = timedelta(seconds=10)
    unsigned = lambda client: client.quorum(replica_id="d", timeout=timeout, data={"x": [1]})  # noqa: E731
    stranger = fleet.threads.submit(fleet.members["d"]._asking.use, unsigned)
    view = fleet.ask_all("abc")[0]
    assert len(stranger.result().participants) == 4
    assert seen(view) == [("a", 0), ("c", 0)]
    assert [line.partition(" was left out: ")[::2] for line in view.complaints] == [
        ("A member that calls itself 'b'", "its header's signature is wrong; does it have another token?"),
        ("A member that calls itself 'd'", "its header has no signature."),
    ]


def test_addresses_that_do_not_work():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen at 127.0.0.1:{port}: Address already in use"):
            serve(f"127.0.0.1:{port}", 1, 1.0, 1.0)
    with pytest.raises(UserError, match=r"has to be HOST:PORT"):
        serve("127.0.0.1", 1, 1.0, 1.0)
