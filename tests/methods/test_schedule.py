"""The outer schedule by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.methods.schedule import Schedule


@st.composite
def schedules(draw):
    layers = draw(st.integers(1, 9))
    fragments = draw(st.integers(1, layers + 1))
    period = draw(st.integers(fragments, 12))
    delay = draw(st.integers(0, period - 1))
    return Schedule(period, fragments, delay, layers, draw(st.sampled_from(["sequential", "strided"])))


@given(schedules())
def test_every_fragment_is_sent_every_period_exactly_and_applied_once_after_the_delay(schedule):
    sends = {fragment: [] for fragment in range(schedule.fragments)}
    applies = {fragment: [] for fragment in range(schedule.fragments)}
    for step in range(4 * schedule.period + 1):
        if (fragment := schedule.sent(step)) is not None:
            sends[fragment].append(step)
        if (fragment := schedule.applied(step)) is not None:
            applies[fragment].append(step)
    for fragment, steps in sends.items():
        assert len(steps) >= 3
        assert set(np.diff(steps)) == {schedule.period}
        assert 0 < steps[0] <= schedule.period
        arrived = [step + schedule.delay for step in steps if step + schedule.delay <= 4 * schedule.period]
        assert applies[fragment] == arrived
        assert schedule.sends(fragment, 4 * schedule.period) == len(steps)


@given(schedules())
def test_the_layers_are_shared_out_evenly_and_once(schedule):
    groups = [schedule.layers_of(fragment) for fragment in range(1, schedule.fragments)]
    if groups:
        assert sorted(np.concatenate(groups)) == list(range(schedule.layers))
        sizes = {len(group) for group in groups}
        assert max(sizes) - min(sizes) <= 1


@given(schedules(), st.integers(0, 40))
def test_the_last_sending_is_the_last_step_with_one(schedule, step):
    slow = [s for s in range(1, step + 1) if schedule.sent(s) is not None]
    assert schedule.last_sent(step) == (slow[-1] if slow else 0)


@given(schedules(), st.integers(0, 20), st.integers(1, 40))
def test_outer_steps_are_the_sends_and_the_synchronisation_at_the_end(schedule, first, more):
    last, fragments = first + more, range(schedule.fragments)
    sends = [[step for step in range(first + 1, last + 1) if schedule.sent(step) == each] for each in fragments]
    assert schedule.outer_steps(first, last) == max(len({*steps, last}) for steps in sends)


def test_offsets_and_patterns():
    """10 steps and 4 fragments: every fragment again after 10 steps, not after 8."""
    schedule = Schedule(period=10, fragments=4, layers=3)
    assert [schedule.offset(fragment) for fragment in (1, 2, 3, 0)] == [0, 2, 5, 7]
    assert Schedule(9, 3, 0, 5, "strided").layers_of(1).tolist() == [0, 2, 4]
    assert Schedule(9, 3, 0, 5, "sequential").layers_of(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"period": 0}, "sync.period is 0"),
        ({"delay": 4}, "sync.delay is 4"),
        ({"delay": -1}, "sync.delay is -1"),
        ({"fragments": 5}, "3 layers"),
        ({"fragments": 4, "period": 3}, "at most 3 fragments"),
        ({"pattern": "random"}, "sequential, strided"),
    ],
)
def test_mistakes_are_told(changed, told):
    with pytest.raises(UserError, match=told):
        Schedule(**{"period": 4, "layers": 3, **changed})


@given(schedules())
def test_rounds_of_islands_are_the_sends_in_their_order(schedule):
    sends = [
        (step, schedule.sent(step)) for step in range(1, 3 * schedule.period + 1) if schedule.sent(step) is not None
    ]
    numbers = range(len(sends))
    assert [(schedule.round_step(n), schedule.round_fragment(n)) for n in numbers] == sends
    assert schedule.rounds(3 * schedule.period) == len(sends)
    assert schedule.round_step(-1) == 0
