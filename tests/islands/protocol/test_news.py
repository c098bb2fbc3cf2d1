"""What a lighthouse tells of its fleet."""

from gregale.islands.protocol.stalls import COMPILES, News

HERE = {"oslo": "s", "turin": "s"}


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


def test_a_stall_report_names_islands_that_compile_whatever_the_others_wait_for():
    news, others = News(), {"bergen": "s", "paris": "s"}
    news.changes(HERE | others, 100.0, 2.0)
    for name in others:
        news.report(name, 4, "the coordinator waits for the requests of oslo and turin", 100.0)
    for name in HERE:
        news.report(name, 4, f"{COMPILES}; and more", 100.0)
    assert news.stall([*HERE, *others], 163.0) == [
        "No round for 63 s: compiling the programs of the next stage: oslo, turin; the coordinator waits for the "
        "requests of oslo and turin."
    ]


def test_a_stall_report_names_islands_without_requests():
    news = News()
    news.changes(HERE, 100.0, 2.0)
    assert news.stall(["oslo"], 160.0) == []
    assert news.stall(["oslo"], 163.0) == ["No round for 63 s: alive, but not asking for a round: turin."]


def test_nothing_is_reported_after_the_fleet_has_ended():
    news = fleet(2)
    news.leave("oslo")
    news.leave("turin")
    news.changes({}, 21.0, 2.0)
    assert news.stall((), 1000.0) == []
