"""Asking a real coordinator: what is asked with is what is true now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Queue

import pytest

from gregale.islands.protocol.headers import NO_ROUND, View
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.lighthouse import Lighthouse, Quorum, serve
from gregale.islands.view_poller import ViewPoller

TOKEN = b"a token of the fleet"
PATIENCE = 30.0
ARRIVES_SECONDS = 0.6  # the coordinator cannot be asked who waits


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    """Answers at two members, or after a long time."""
    lighthouse = serve("127.0.0.1:0", TOKEN, Quorum(minimum=2, join_seconds=PATIENCE, heartbeat_seconds=PATIENCE))
    yield lighthouse
    lighthouse.close()


@pytest.fixture
def member(lighthouse):
    made = []

    def make(name: str, token: bytes = TOKEN) -> tuple[ViewPoller, Queue[View | str]]:
        """One that asks; its views, its complaints, and why it ends."""
        views: Queue[View | str] = Queue()
        coordinator = CoordinatorClient(lighthouse.address, name, token, PATIENCE)
        asking = ViewPoller(coordinator, PATIENCE, views.put, lambda reason: None, views.put, views.put)
        asking.start()
        made.append(asking)
        return asking, views

    yield make
    for asking in made:
        asking.close()


def test_a_new_header_replaces_a_pending_one(member, header):
    """An island that has healed is in the next view as it is now, not as it was when it asked."""
    late, its_views = member("a")
    other, _ = member("b")
    late.ask(header("a", round=4, asked=1))
    time.sleep(ARRIVES_SECONDS)
    late.ask(header("a", round=5, asked=2))
    time.sleep(ARRIVES_SECONDS)
    other.ask(header("b", round=5, asked=1))
    view = its_views.get(timeout=PATIENCE)
    assert isinstance(view, View)
    assert [(each.name, each.round) for each in view.headers] == [("a", 5), ("b", 5)]
    assert its_views.empty(), "the answer to the old header is not handed on"


def test_only_the_island_with_another_token_ends(member, header):
    """Also before anybody has met a peer."""
    one, views = member("a")
    one.ask(header("a"))
    stranger, why = member("b", b"another token here")
    stranger.ask(header("b"))
    assert "islands.token_file" in str(why.get(timeout=PATIENCE))
    other, _ = member("c")
    other.ask(header("c"))
    view = views.get(timeout=PATIENCE)
    assert isinstance(view, View)
    assert [each.name for each in view.headers] == ["a", "c"]


def test_a_header_of_another_version_ends_an_island_without_a_state_only_if_it_has_one(lighthouse, member, header):
    """Else the other one is as new, and may be the one that is wrong."""
    newer = CoordinatorClient(lighthouse.address, "newer", TOKEN, PATIENCE)
    fresh, told = member("a")
    for state in (NO_ROUND, 7):
        fresh.ask(header("a", round=NO_ROUND))
        newer.ask({"round": state, "colour": "blue"}, PATIENCE)
        line = told.get(timeout=PATIENCE)
        if state == NO_ROUND:
            assert line == "newer: a header does not have the fields of this version of Gregale"
            assert isinstance(told.get(timeout=PATIENCE), View)
    assert "has another version of Gregale: newer: a header" in str(line)
    newer.close()


def test_no_thread_is_left_in_a_request_when_it_is_closed(header):
    """One that comes back from the library's own code while Python ends would abort the process."""
    failed: Queue[str] = Queue()
    nobody = CoordinatorClient("127.0.0.1:9", "a", TOKEN, 0.5)
    asking = ViewPoller(nobody, PATIENCE, print, failed.put, print, print)
    asking.start()
    for number in range(3):
        asking.ask(header("a", round=4, asked=number))
    failed.get(timeout=PATIENCE)
    asking.ask(header("a", round=4, asked=3))
    asking.close()
    assert [thread.name for thread in threading.enumerate() if thread.name in ("asking", "gregale-heartbeat")] == []
