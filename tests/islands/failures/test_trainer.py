"""Steps in closed form against steps counted one by one."""

import pytest

from gregale.islands.failures.trainer import Trainer


def test_steps_follow_each_other():
    trainer = Trainer(2.0, fragments=1)
    assert trainer.progress(5.0) == 0
    trainer.begin(1.0)
    assert trainer.steps(4.9) == 1
    assert trainer.steps(5.0) == 2
    assert trainer.progress(6.0) == pytest.approx(2.5)
    assert trainer.boundary(6.0) == pytest.approx(7.0)
    assert trainer.boundary(7.0) == pytest.approx(7.0)
    assert trainer.time_of(10, 6.0) == pytest.approx(21.0)
    assert trainer.time_of(1, 6.0) == 6.0


def test_a_hold_is_waiting_and_no_step():
    trainer = Trainer(2.0, fragments=1)
    trainer.begin(0.0)
    trainer.hold(3)
    assert trainer.waited(6.0) == 0
    assert trainer.boundary(9.0) == 9.0
    assert (trainer.steps(9.0), trainer.waited(9.0), trainer.busy(9.0)) == (3, 3.0, 6.0)
    trainer.release(10.0)
    assert (trainer.steps(12.0), trainer.waited(12.0)) == (4, 4.0)


def test_a_hold_that_ends_early_costs_nothing():
    trainer = Trainer(2.0, fragments=1)
    trainer.begin(0.0)
    trainer.hold(3)
    trainer.release(5.0)
    assert (trainer.steps(8.0), trainer.waited(8.0)) == (4, 0.0)


def test_what_was_not_contributed_is_an_average_over_the_fragments():
    trainer = Trainer(2.0, fragments=2)
    trainer.begin(0.0)
    trainer.marks[0] += 4
    assert trainer.pending(10.0) == pytest.approx((1 + 5) / 2 * 2.0)
    trainer.discard(10.0)
    assert trainer.pending(10.0) == 0
