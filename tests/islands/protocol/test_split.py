"""Who sends what to whom: parts by the rates of links, against a search for the smallest largest time; and news."""

import numpy as np
import pytest

from gregale.islands.protocol.decision import FASTEST, TOLERANCE, WHOLE, distances, level, parts, rate, recipients


def by_bisection(rates: np.ndarray) -> float:
    low, high = 0.0, 2 / min(rates)
    for _ in range(200):
        time = (low + high) / 2
        enough = sum(np.maximum(0, time * rates - 1)) >= len(rates) - 2
        low, high = (low, time) if enough else (time, high)
    return high


@pytest.mark.parametrize("seed", range(20))
def test_no_other_parts_are_faster(seed):
    random = np.random.default_rng(seed)
    levels = [int(each) for each in random.integers(20, 50, random.integers(3, 12))]
    found, rates = parts(levels), np.array([rate(each) for each in levels])
    assert sum(found) == WHOLE
    shares = np.array(found) / WHOLE
    times = (1 + (len(rates) - 2) * shares) / rates  # of the members that average something, in units of a message
    assert max(times[shares > 0]) == pytest.approx(by_bisection(rates), rel=0.2)


def test_a_slow_link_averages_nothing_and_equal_unknown_and_absurd_ones_break_nothing():
    assert parts([level(mbits * 1e6 / 8) for mbits in (100, 100, 50, 10)]) == (128, 128, 0, 0)
    assert parts([40, 40 + TOLERANCE, 41]) == parts([0, 0, 0]) == parts([40, 20]) == parts([0, 40, 0]) == ()
    assert parts([48, 0, 48, 30]) == parts([48, 48, 48, 30]) != ()
    assert parts([10**9, FASTEST, FASTEST]) == ()
    assert parts([10**9, 1, 1]) == (WHOLE, 0, 0)
    assert level(0.0) == level(-1.0) == 1
    assert level(1e30) == FASTEST


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 64, 100, 256, 257])
def test_all_are_reached_in_logarithmically_many_hops_and_each_reaches_each_within_as_many_turns(count):
    members = [f"{number}:1" for number in range(count)]
    reached = {members[-1]}
    for _ in range((count - 1).bit_length()):
        reached |= {other for each in reached for other in recipients(members, each, 0)}
    assert reached == {*members}
    assert len(distances(count)) == (count - 1).bit_length()
    turns = [recipients(members, members[0], turn) for turn in range(count - 1)]
    assert {each for turn in turns for each in turn} == {*members[1:]}, "directly, too"
    assert all(len(turn) <= (count - 1).bit_length() + 1 for turn in turns)
