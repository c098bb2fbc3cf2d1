"""When an island says that rounds have stopped."""

from gregale.islands.protocol.settings import LAN
from gregale.islands.protocol.silence import Silence


def lines(silence: Silence, until: float, start: float = 0.0, is_due: bool = True) -> list[tuple[float, str]]:
    """When something is said, and what."""
    said = [(float(at), silence.look(at, is_due, lambda: "b is missing")) for at in range(int(start), int(until) + 1)]
    return [(at, line) for at, line in said if line]


def rounds(silence: Silence, count: int, seconds: float = 10.0) -> float:
    for number in range(count):
        assert silence.went_on(number * seconds, number) is None
    return (count - 1) * seconds


def test_a_stall_is_reported_after_three_median_rounds_and_then_ever_more_rarely():
    silence = Silence(LAN)
    start = rounds(silence, 5)
    assert lines(silence, start + 250, start) == [
        (start + 30, "No round for 30 s: b is missing."),
        (start + 60, "No round for 60 s: b is missing."),
        (start + 120, "No round for 120 s: b is missing."),
        (start + 240, "No round for 240 s: b is missing."),
    ]
    assert silence.line == "No round for 240 s: b is missing."
    assert silence.went_on(start + 250, 6) == "Rounds go on: round 6 after 250 s."
    assert silence.line is None
    assert silence.went_on(start + 260, 7) is None


def test_one_long_round_does_not_change_the_median():
    silence = Silence(LAN)
    last = rounds(silence, 8)
    silence.went_on(last + 500, 8)
    assert silence.usual_seconds == 10.0


def test_before_the_first_round_the_stall_time_starts_when_one_is_due():
    silence = Silence(LAN)
    assert lines(silence, 1000, is_due=False) == []
    expected = 3 * (LAN.join_seconds + LAN.reduce_seconds)
    assert [at for at, _ in lines(silence, 1030, 1000)] == [1000 + expected]


def test_a_fetched_state_ends_a_stall_but_does_not_change_the_median():
    silence = Silence(LAN)
    last = rounds(silence, 3)
    silence.went_on(last + 1.0, 9, is_healed=True)
    assert silence.usual_seconds == 10.0
    assert lines(silence, last + 30, last + 1) == []
