"""Data-parallel with failures, worked out by hand."""

import math

import pytest

from gregale.islands.failures.data_parallel import Checkpoints, best_interval, data_parallel
from gregale.islands.failures.fleet import Fleet, Outage, Site, draw_outages
from gregale.methods.schedule import Schedule

CHECKPOINTS = Checkpoints(interval_seconds=90.0, save_seconds=10.0, reform_seconds=50.0)


def fleet_of(*step_seconds):
    return Fleet(tuple(Site(each, 1e9) for each in step_seconds), Schedule(100), 0, 0, 0)


@pytest.mark.parametrize("elastic", [True, False])
def test_no_failure_costs_the_checkpoints_alone(elastic):
    found = data_parallel(fleet_of(1.0, 1.0), (), 1000.0, CHECKPOINTS, elastic)
    assert (found.goodput, found.tokens, found.lost, found.down) == (0.9, 0.9, 0.0, 0.0)


def test_all_wait_for_the_slowest():
    found = data_parallel(fleet_of(1.0, 1.0, 2.0), (), 1000.0, CHECKPOINTS, elastic=True)
    assert found.goodput == pytest.approx(0.9 * (0.5 + 0.5 + 1) / 3)
    assert found.tokens == pytest.approx(0.9 * (3 / 2) / 2.5)


def test_one_death():
    # At 250 s two checkpoints are there and 50 s are lost. Plain: all wait until 400, and train from 450 on: 500 s in
    # five cycles, and 50 s more.
    outages = (Outage(250.0, 0, 400.0),)
    plain = data_parallel(fleet_of(1.0, 1.0), outages, 1000.0, CHECKPOINTS, elastic=False)
    assert plain.goodput == pytest.approx((180 + 450 + 50) / 1000)
    assert plain.lost == pytest.approx(50 / 1000)
    # Elastic: one goes on from 300 on, saves at 400, takes the other in, and both train from 450 on.
    elastic = data_parallel(fleet_of(1.0, 1.0), outages, 1000.0, CHECKPOINTS, elastic=True)
    assert elastic.goodput == pytest.approx((180 + 90 / 2 + 450 + 50) / 1000)
    assert elastic.tokens == pytest.approx(elastic.goodput)
    assert elastic.lost == pytest.approx(50 / 1000)
    assert elastic.down == pytest.approx(150 / 2000)


def test_a_fleet_that_fails_faster_than_it_reforms_gets_nowhere():
    outages = draw_outages(1000, 20_000.0, 10.0, 1000.0, seed=0)
    assert len(outages) > 30
    found = data_parallel(fleet_of(*[1.0] * 1000), outages, 1000.0, CHECKPOINTS, elastic=True)
    assert found.goodput < 0.1


def test_dalys_expectation():
    # One site that is back at once: w seconds of work take m exp(reform / m) (exp((w + save) / m) - 1) seconds.
    mtbf, seconds = 500.0, 500_000.0
    outages = draw_outages(1, mtbf, 1e-9, seconds, seed=0)
    found = data_parallel(fleet_of(1.0), outages, seconds, CHECKPOINTS, elastic=False)
    expected = 90 / (mtbf * math.exp(50 / mtbf) * (math.exp(100 / mtbf) - 1))
    assert found.goodput == pytest.approx(expected, rel=0.04)


def test_youngs_interval():
    assert best_interval(30.0, 3600.0) == pytest.approx(math.sqrt(2 * 30 * 3600))
