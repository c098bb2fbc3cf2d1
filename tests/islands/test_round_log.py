"""What rounds.jsonl has of a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gregale.islands import round_log
from gregale.islands.host_worker import Count
from gregale.islands.protocol.headers import Generation, OuterRecord
from gregale.islands.protocol.ledger import Ledger
from gregale.islands.round_log import RoundLog

OUTER = OuterRecord(Generation(1, "line"), 3, "digest", "key", 2, Ledger())


class Clock:
    def __init__(self):
        self.now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(round_log, "time", SimpleNamespace(time=clock.time))
    return clock


@pytest.fixture
def written() -> list[dict[str, Any]]:
    return []


def test_a_round_that_ends_during_a_wait_includes_that_time(clock, written):
    """The wait is over because the round is: it is written down before the trainer says that it goes on."""
    book = RoundLog(Count(), written.append)
    book.begin()
    clock.now += 2
    book.wait_begins()
    clock.now += 3
    book.end(OUTER, 10.0)
    book.wait_ends()
    assert (written[0]["waiting_seconds"], written[0]["seconds"]) == (3, 5)


def test_a_wait_is_shared_among_the_rounds_in_it(clock, written):
    book = RoundLog(Count(), written.append)
    book.wait_begins()
    clock.now += 1
    book.begin()
    clock.now += 2
    book.end(OUTER, 10.0)
    clock.now += 4
    book.begin()
    clock.now += 8
    book.wait_ends()
    clock.now += 16
    book.end(OUTER, 10.0)
    assert [each["waiting_seconds"] for each in written] == [2, 8]


def test_a_round_without_a_wait_has_no_waiting_time(clock, written):
    book = RoundLog(Count(), written.append)
    book.begin()
    clock.now += 2
    book.end(OUTER, 10.0)
    assert written[0]["waiting_seconds"] == 0
