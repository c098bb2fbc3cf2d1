"""Ranges: what they hold, and what they are called."""

import math

import pytest

from gregale.errors import UserError, below
from gregale.optim import AdamWConfig, CosineSchedule
from gregale.settings import DECAY, Range, above, at_least, between, whole

RANGES = [
    (whole(1), [1, 2**31 - 1], [0, -1, 2**31, 10**400, math.nan], "at least 1", ">= 1"),
    (whole(0, 4096), [0, 4096], [-1, 4097], "from 0 to 4,096", "0 to 4,096"),
    (whole(1, also=(-1,)), [1, -1], [0, -2], "at least 1 or -1", ">= 1 or -1"),
    (at_least(0), [0, 0.0, 3e38], [-1e-30, 1e39, math.inf, -math.inf, math.nan], "at least 0", ">= 0"),
    (above(0), [1e-37, 1.0], [0.0, 1e-320, -1.0, math.nan], "above 0", "> 0"),
    (between(0, 1), [0, 1, 0.5], [-0.1, 1.1, math.nan], "from 0 to 1", "0 to 1"),
    (DECAY, [0, 0.99], [1, -0.1, math.nan], "at least 0 and below 1", ">= 0, < 1"),
    (Range(0, 1e9, above=True), [1e9], [0, 2e9], "above 0 and at most 1,000,000,000", "> 0, <= 1,000,000,000"),
]


@pytest.mark.parametrize(("span", "inside", "outside", "words", "signs"), RANGES, ids=lambda value: str(value)[:20])
def test_a_range(span, inside, outside, words, signs):
    assert [number for number in inside if number not in span] == []
    assert [number for number in outside if number in span] == []
    assert (span.words(), span.signs()) == (words, signs)


def test_a_mistake_is_told_with_the_key_of_where_it_lies():
    with pytest.raises(UserError, match=r"^sync\.outer\.schedule\.warmup is 9 = 9 steps"), below("sync.outer"):
        AdamWConfig(schedule=CosineSchedule(warmup=9)).build_schedule(1.0, steps=9)
