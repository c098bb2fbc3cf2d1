"""A recipient that does not answer takes one thread and one place, however often there is something for it."""

from collections.abc import Iterator
from queue import Queue
from threading import Event

import pytest

from gregale.islands.driver import LatestWork


@pytest.fixture
def work() -> Iterator[LatestWork]:
    work = LatestWork(2, "test")
    yield work
    work.shutdown(wait=False, cancel_futures=True)


def test_the_newest_replaces_what_waits_for_a_silent_peer(work):
    started, answers, told = Event(), Event(), Queue()

    def first() -> None:
        started.set()
        answers.wait()
        told.put(0)

    work.put("cut", first)
    started.wait()
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
    told: Queue[str] = Queue()
    started, fails = Event(), Event()

    def failing() -> None:
        started.set()
        fails.wait()
        raise ValueError

    work.put("a", failing)
    started.wait()
    work.put("a", lambda: told.put("next"))
    fails.set()
    assert told.get() == "next"


def test_nothing_starts_after_shutdown(work):
    started, goes_on, told = Event(), Event(), Queue()

    def first() -> None:
        started.set()
        goes_on.wait()
        told.put("first")

    work.put("a", first)
    started.wait()
    work.put("a", lambda: told.put("second"))
    work.shutdown(wait=False, cancel_futures=True)
    goes_on.set()
    assert told.get() == "first"
    work.shutdown(wait=True)
    assert told.empty()
