"""View requests to a real coordinator: an answer counts only if it is that to the newest header."""

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from queue import Queue

import pytest

from gregale.islands.driver import ViewPoller
from gregale.islands.protocol.messages import LAN, View
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.lighthouse import Lighthouse

TOKEN = b"a token of the fleet"
PATIENCE = 30.0
TIMING = replace(LAN, heartbeat_seconds=PATIENCE)


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    lighthouse = Lighthouse("127.0.0.1:0", TOKEN)
    lighthouse._membership._started = -PATIENCE  # a fleet may begin at once
    yield lighthouse
    lighthouse.close()


@pytest.fixture
def member(lighthouse):
    made = []

    def make(name: str) -> tuple[ViewPoller, Queue[View | str]]:
        """Return a poller, and its views, its complaints, and why it ends."""
        views: Queue[View | str] = Queue()
        coordinator = CoordinatorClient(lighthouse.address, name, TOKEN, TIMING)
        made.append(ViewPoller(coordinator, views.put, lambda reason: None, views.put, views.put))
        return made[-1], views

    yield make
    for poller in made:
        poller.close()


def test_a_new_header_replaces_a_pending_one(lighthouse, member, header):
    """An island that has healed is in the next view as it is now, not as it was at its first request."""

    def arrived(number: int) -> bool:
        return any(ask.number == number for ask in lighthouse._membership.pending.values())

    late, its_views = member("a")
    other, _ = member("b")
    for number in range(2):
        late.ask(header("a", round=4 + number, asked=1 + number), 2)
        until = time.monotonic() + PATIENCE
        while not arrived(number):
            assert time.monotonic() < until
            time.sleep(0.01)
    other.ask(header("b", round=5, asked=1), 2)
    view = its_views.get(timeout=PATIENCE)
    assert isinstance(view, View)
    assert [(each.name, each.round) for each in view.headers] == [("a", 5), ("b", 5)]
    assert its_views.empty(), "the answer to the old header is not passed on"


def test_an_unreadable_header_is_left_out_and_reported_once(lighthouse, member, header):
    other = CoordinatorClient(lighthouse.address, "other", TOKEN, TIMING)
    poller, told = member("a")
    for number in (1, 2):
        poller.ask(header("a", asked=number), 2)
        other.ask(asdict(header("other")) | {"round": "7"}, 2)
        if number == 1:
            assert told.get(timeout=PATIENCE) == "other: a header has no usable 'round'"
        view = told.get(timeout=PATIENCE)
        assert isinstance(view, View)
        assert [(each.name, each.asked) for each in view.headers] == [("a", number)]
    other.close()


def test_no_thread_is_left_in_a_request_after_close(header):
    """One that comes back from the library's own code while Python ends would abort the process."""
    failed: Queue[str] = Queue()
    nobody = CoordinatorClient("127.0.0.1:9", "a", TOKEN, replace(TIMING, heartbeat_seconds=0.5))
    poller = ViewPoller(nobody, print, failed.put, print, print)
    for number in range(3):
        poller.ask(header("a", round=4, asked=number), 1)
    failed.get(timeout=PATIENCE)
    poller.ask(header("a", round=4, asked=3), 1)
    poller.close()
    poller.ask(header("a", round=4, asked=4), 1)
    assert [thread.name for thread in threading.enumerate() if thread.name in ("asking", "gregale-heartbeat")] == []
