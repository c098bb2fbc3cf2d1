"""The parts of a driver: view requests to a real coordinator, probes of peers, work by key, and the log of rounds."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from gregale.islands import driver
from gregale.islands.driver import LatestWork, PeerProbe, RoundLog, ViewPoller, dead_peers
from gregale.islands.protocol.messages import LAN, Peer, View, seed
from gregale.islands.transport.coordinator import CoordinatorClient
from gregale.islands.transport.group import Count
from gregale.islands.transport.lighthouse import Lighthouse
from gregale.islands.transport.server import Endpoint, Server
from tests.islands.transport.conftest import TOKEN
from tests.waiting import until

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
        until(lambda number=number: arrived(number))
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


def test_a_peer_that_accepts_connections_but_is_silent_is_named_and_the_group_dropped():
    """As a stopped process does."""
    dropped = Event()
    server = Server(Endpoint("127.0.0.1"), TOKEN, dict)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        peers = {"lives": server.address, "stopped": f"127.0.0.1:{stopped.getsockname()[1]}"}
        with PeerProbe(peers, TOKEN, 0.6, dropped.set) as probe:
            assert dropped.wait(10.0)
        assert probe.silent == ["stopped"]
        assert probe.reason() == "stopped did not answer"
    server.close()


def test_a_busy_server_that_closes_a_probe_is_asked_again(monkeypatch):
    """As one does with the oldest connections when too many come at once."""
    answered, dropped = Event(), Event()
    server = Server(Endpoint("127.0.0.1"), TOKEN, dict, status=lambda: {"answered": answered.set()})
    refused, process = [], server._http.process_request

    def busy(request, address) -> None:
        if len(refused) < 2:
            refused.append(request)
            server._http.shutdown_request(request)
        else:
            process(request, address)

    monkeypatch.setattr(server._http, "process_request", busy)
    with PeerProbe({"busy": server.address}, TOKEN, 4.0, dropped.set) as probe:
        assert answered.wait(10.0)
    assert len(refused) == 2
    assert not dropped.is_set()
    assert probe.silent == []
    server.close()


def test_only_a_refused_connection_means_dead():
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as other:
        silent, port = f"127.0.0.1:{stopped.getsockname()[1]}", other.getsockname()[1]
        peers = [Peer("stopped", "1", (silent,)), Peer("nowhere", "2", ("no.such.host.invalid:9",))]
        assert dead_peers(peers) == frozenset()
        other.close()
        assert dead_peers([*peers, Peer("killed", "3", (f"127.0.0.1:{port}",))]) == {"killed/3"}


def begun(work: LatestWork, key: str, what: Callable[[], object]) -> Event:
    """Work that has begun, and goes on once this is set."""
    started, goes_on = Event(), Event()

    def first() -> None:
        started.set()
        goes_on.wait()
        what()

    work.put(key, first)
    started.wait()
    return goes_on


@pytest.fixture
def work() -> Iterator[LatestWork]:
    work = LatestWork(2, "test")
    yield work
    work.shutdown(wait=False, cancel_futures=True)


def test_the_newest_replaces_what_waits_for_a_silent_peer(work):
    told = Queue()
    answers = begun(work, "cut", lambda: told.put(0))
    for number in range(1, 100):
        work.put("cut", lambda number=number: told.put(number))
    work.put("other", lambda: told.put("other"))
    assert told.get() == "other", "it does not wait behind the announcements to the silent peer"
    answers.set()
    assert [told.get(), told.get()] == [0, 99]
    work.put("cut", lambda: told.put("again"))
    assert told.get() == "again"
    assert told.empty()


def test_work_that_fails_does_not_block_its_key(work):
    told = Queue[str]()
    fails = begun(work, "a", lambda: 1 / 0)
    work.put("a", lambda: told.put("next"))
    fails.set()
    assert told.get() == "next"


def test_nothing_starts_after_shutdown(work):
    told = Queue()
    goes_on = begun(work, "a", lambda: told.put("first"))
    work.put("a", lambda: told.put("second"))
    work.shutdown(wait=False, cancel_futures=True)
    goes_on.set()
    assert told.get() == "first"
    work.shutdown(wait=True)
    assert told.empty()


@pytest.mark.parametrize(
    ("events", "waiting", "seconds"),
    [
        # The wait ends because the round does: the round is recorded before the trainer continues.
        (["begin", 2, "wait_begins", 3, "end", "wait_ends"], [3], [5]),
        (["wait_begins", 1, "begin", 2, "end", 4, "begin", 8, "wait_ends", 16, "end"], [2, 8], [2, 24]),
        (["begin", 2, "end"], [0], [2]),
    ],
    ids=["ends in a wait", "a wait of two rounds", "no wait"],
)
def test_a_wait_is_shared_among_the_rounds_in_it(monkeypatch, events, waiting, seconds):
    now, written = [100.0], list[dict[str, Any]]()
    monkeypatch.setattr(driver, "time", SimpleNamespace(time=lambda: now[0]))
    log = RoundLog(Count(), written.append)
    for event in events:
        if event == "end":
            log.end(seed("digest"), 10.0)
        elif isinstance(event, str):
            getattr(log, event)()
        else:
            now[0] += event
    assert [each["waiting_seconds"] for each in written] == waiting
    assert [each["seconds"] for each in written] == seconds
