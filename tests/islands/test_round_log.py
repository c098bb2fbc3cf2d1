"""The waiting time of rounds in rounds.jsonl."""

from types import SimpleNamespace
from typing import Any

import pytest

from gregale.islands import driver
from gregale.islands.driver import RoundLog
from gregale.islands.protocol.messages import seed
from gregale.islands.transport.group import Count


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
