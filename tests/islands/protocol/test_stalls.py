"""When an island and a lighthouse report that rounds have stopped, and why."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gregale.islands.protocol.messages import LAN, NO_ROUND, Rules, seed
from gregale.islands.protocol.stalls import COMPILES, News, RunningTime, Stalls
from gregale.islands.protocol.trainer_side import Handover

HERE = {"oslo": "s", "turin": "s"}


@pytest.fixture
def member() -> Any:
    return SimpleNamespace(
        timing=LAN,
        rules=Rules(stages=(4,)),
        handover=Handover(),
        outer=seed("d"),
        done=False,
        is_complete=False,
        stall_reason=lambda: "b is missing",
        is_reason_known=lambda since, seconds: True,
    )


@pytest.fixture
def trainer() -> Any:
    return SimpleNamespace(progress=lambda number: (3, 10))


@pytest.fixture
def stalls(member, trainer) -> Stalls:
    return Stalls(member, trainer)


def lines(stalls: Stalls, until: float, start: float = 0.0) -> list[tuple[float, str]]:
    """When a line is reported, and the line."""
    found = [(float(at), stalls.look(at)) for at in range(int(start), int(until) + 1)]
    return [(at, line) for at, line in found if line]


def went_on(stalls: Stalls, now: float, number: int, is_healed: bool = False) -> str | None:
    return stalls.went_on(now, replace(seed("d"), round=number), is_healed)


def rounds(stalls: Stalls, count: int) -> float:
    for number in range(count):
        assert went_on(stalls, 10.0 * number, number) is None
    return 10.0 * (count - 1)


def test_a_stall_is_reported_after_three_median_rounds_and_then_ever_more_rarely(stalls):
    start = rounds(stalls, 5)
    expected = [(start + at, f"No round for {at} s: b is missing.") for at in (30, 60, 120, 240)]
    assert lines(stalls, start + 250, start) == expected
    assert (stalls.line, stalls.reason) == ("No round for 240 s: b is missing.", "b is missing")
    assert went_on(stalls, start + 250, 6) == "Rounds go on: round 6 after 250 s."
    assert (stalls.line, stalls.reason) == (None, None)
    assert went_on(stalls, start + 260, 7) is None
    assert lines(stalls, start + 290, start + 261) == [(start + 290, "No round for 30 s: b is missing.")]


def test_before_the_first_round_the_stall_time_starts_when_one_is_due(stalls, member):
    member.outer = replace(member.outer, round=0)
    assert lines(stalls, 1000) == []
    member.handover.fall_due(1000.0)
    expected = 3 * (LAN.join_seconds + LAN.reduce_seconds)
    assert [at for at, _ in lines(stalls, 1030, 1000)] == [1000 + expected]


def test_a_fetched_state_ends_a_stall_but_does_not_change_the_median(stalls):
    last = rounds(stalls, 3)
    went_on(stalls, last + 1.0, 9, is_healed=True)
    assert [at for at, _ in lines(stalls, last + 40, last + 1)] == [last + 31]


MADE = "this island has made 3 of the 10 steps of a round"


@pytest.mark.parametrize(
    ("number", "starved", "due", "compiles", "other", "why"),
    [
        (NO_ROUND, False, False, False, "", "the fleet has not begun"),
        (4, False, False, False, "", MADE),
        (4, True, False, False, "", f"{MADE}; all data leased to this island is used"),
        (4, False, True, False, "", "this island is in the middle of a step (one takes 2.0 s)"),
        (4, False, True, True, "", "this island compiles the programs of the next stage"),
        (4, False, True, True, "b is missing", "this island compiles the programs of the next stage; b is missing"),
        (5, False, True, True, "", "this island compiles a program"),
    ],
)
def test_the_island_itself_may_be_the_reason(member, trainer, number, starved, due, compiles, other, why):
    member.stall_reason, member.outer = lambda: other, replace(seed("d"), round=number)
    member.handover.starved, member.handover.step_seconds = starved, 2.0
    stalls = Stalls(member, trainer, lambda: compiles)
    rounds(stalls, 2)
    if due:
        member.handover.fall_due(10.0)
        member.handover.want(4)
    assert lines(stalls, 40, 10) == [(40.0, f"No round for 30 s: {why}.")]


def test_a_stop_of_the_process_itself_is_the_reason_and_begins_the_wait_again(stalls):
    """The clock is that of a process that stops; 20 s pass for the others."""
    last, raw = rounds(stalls, 5), [0.0]
    clock = RunningTime(lambda: raw[0])
    began = clock()
    for second in range(10):
        raw[0] = second / 2
        assert stalls.look(last + clock() - began, clock.stopped) is None
    raw[0] += 20.25
    line = stalls.look(last + clock() - began, clock.stopped)
    assert line == "No round for 20 s: this process was stopped, or its machine was suspended."
    assert stalls.reason == "this process was stopped, or its machine was suspended"
    again = last + clock() - began
    found = [(at, stalls.look(again + at, clock.stopped)) for at in range(1, 40)]
    assert [each for each in found if each[1]] == [(30, "No round for 30 s: b is missing.")]


def test_a_stop_that_the_others_have_not_noticed_and_a_member_that_has_left_are_not_reported(stalls, member):
    last = rounds(stalls, 5)
    assert stalls.look(last + 1, LAN.heartbeat_seconds / 2) is None
    member.done = True
    assert lines(stalls, 100) == []


def fleet(last: int) -> News:
    """Two islands that have made a round every ten seconds until round `last`, at ten times that."""
    news = News()
    assert news.changes(HERE, 0.0, 2.0) == ["oslo joined: 2 islands now.", "turin joined: 2 islands now."]
    for number in range(last + 1):
        for name in HERE:
            assert news.report(name, number, "", 10.0 * number) == []
        assert news.stall((), 10.0 * number + 9.0) == []
    return news


def test_islands_that_join_and_leave_are_reported():
    news = fleet(0)
    assert news.changes(HERE, 1.0, 2.0) == []
    assert news.changes({**HERE, "turin": "t"}, 1.0, 2.0) == ["turin has started again."]
    assert news.changes({"oslo": "s"}, 2.0, 2.0) == ["turin is gone, silent for 2 s: 1 island now."]
    news.leave("oslo")
    assert news.changes({}, 3.0, 2.0) == ["oslo has left: 0 islands now."]


def test_a_stall_is_reported_once_with_reasons_and_so_is_its_end():
    news = fleet(4)
    assert news.changes({"oslo": "s"}, 45.0, 2.0) == ["turin is gone, silent for 2 s: 1 island now."]
    assert news.report("oslo", 4, "the islands that made the last round are missing", 60.0) == []
    assert news.stall(["oslo"], 72.0) == []
    assert news.stall(["oslo"], 73.0) == [
        "No round for 33 s (usually one takes 10.0 s): the islands that made the last round are missing; silent since "
        "the last round: turin."
    ]
    assert news.stall(["oslo"], 200.0) == []
    assert news.report("oslo", 5, "", 240.0) == ["Rounds go on: round 5 after 200 s."]
    assert news.stall(["oslo"], 250.0) == [], "the usual time is as before"
    assert news.stall(["oslo"], 273.0) != []


def test_a_stall_report_names_islands_without_requests_and_those_that_compile_whatever_the_others_wait_for():
    news, others = News(), {"bergen": "s", "paris": "s"}
    news.changes(HERE, 100.0, 2.0)
    assert news.stall(["oslo"], 160.0) == []
    assert news.stall(["oslo"], 163.0) == ["No round for 63 s: alive, but not asking for a round: turin."]
    news = News()
    news.changes(HERE | others, 100.0, 2.0)
    for name in others:
        news.report(name, 4, "the coordinator waits for the requests of oslo and turin", 100.0)
    for name in HERE:
        news.report(name, 4, f"{COMPILES}; and more", 100.0)
    assert news.stall([*HERE, *others], 163.0) == [
        "No round for 63 s: compiling the programs of the next stage: oslo, turin; the coordinator waits for the "
        "requests of oslo and turin."
    ]


def test_nothing_is_reported_after_the_fleet_has_ended():
    news = fleet(2)
    news.leave("oslo")
    news.leave("turin")
    news.changes({}, 21.0, 2.0)
    assert news.stall((), 1000.0) == []
