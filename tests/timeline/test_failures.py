"""The closed forms of failures, against events that are drawn one after the other."""

import numpy as np
import pytest

from gregale.failures import (
    Division,
    Failures,
    data_parallel,
    elastic,
    elastic_islands,
    islands,
    lock_step,
    useful_share,
)
from tests.programs.test_simulate import printed

FAILURES = Failures(chip_mtbf=1e6, slice_chips=20, restart=60.0, reconfigure=15.0, repair=1000.0, save=5.0)


def drawn(rate: float, restart: float, length: float, save: float) -> float:
    """The useful share of a long time: units of work and saving, restarts, and failures of both."""
    random, now, useful = np.random.default_rng(0), 0.0, 0.0
    while useful < 4e6:
        until = random.exponential(1 / rate)
        units = until // (length + save)
        useful, now = useful + units * length, now + until
        while (again := random.exponential(1 / rate)) < restart:
            now += again
        now += restart
    return useful / now


@pytest.mark.parametrize("length", [50.0, 300.0])
def test_work_that_a_failure_loses(length):
    expected = drawn(1 / 400, 60.0, length, 5.0)
    assert useful_share(1 / 400, 60.0, length, 5.0) == pytest.approx(expected, rel=0.03)


def test_waits_of_an_elastic_run():
    """Of 2,500 chips in slices of 20; each failure and each return begins a wait anew."""
    random, run = np.random.default_rng(1), Division(2500, 1, 0.0, 0.0)
    present = 1 / (1 + 20 / 1e6 * 1000)
    events = np.sort(random.uniform(0, 1e7, random.poisson(2 * present * 2500 / 1e6 * 1e7)))
    waited = np.minimum(np.diff(events, append=1e7), 15.0).sum()
    assert elastic(FAILURES, run) == pytest.approx(present * (1 - waited / 1e7), rel=0.01)


def test_one_island_waits_for_no_other_and_many_for_the_slowest():
    run = Division(5000, 1, 100.0, 20.0)
    assert lock_step(FAILURES, run) == pytest.approx(islands(FAILURES, run), rel=0.02)
    random, seconds = np.random.default_rng(2), np.full((20_000, 4), np.nan)
    for island in np.ndindex(seconds.shape):
        now, until = 0.0, random.exponential(200.0)
        while until < 100.0:
            now += until
            while (again := random.exponential(200.0)) < 80.0:
                now += again
            now, until = now + 80.0, random.exponential(200.0)
        seconds[island] = now + 100.0
    assert lock_step(FAILURES, Division(20_000, 4, 100.0, 20.0)) == pytest.approx(100 / seconds.max(1).mean(), rel=0.02)


def test_the_best_interval_and_islands_that_fail_alone():
    """Young's interval is near the best one; ten islands of a run fail as often as a tenth of it."""
    run, rate = Division(2000, 1, 100.0, 20.0), 2000 / 1e6
    young = useful_share(rate, 60.0, (2 * 5.0 / rate) ** 0.5, 5.0)
    assert young <= data_parallel(FAILURES, run) <= 1.02 * young
    ten = Division(20_000, 10, 100.0, 20.0)
    assert islands(FAILURES, ten) == useful_share(rate, 60.0 + 100.0 / 2 + 20.0, 100.0)
    assert elastic_islands(FAILURES, ten) == elastic(FAILURES, run)


def test_the_published_case(capsys):
    """27, 58 and 88 % of 2.4 million chips (arXiv 2604.21428); the waits are those that fit the first two."""
    case = {"chips": [2_400_000], "islands": [8], "restart_seconds": 11.0, "reconfigure_seconds": 3.5}
    found = printed(capsys, failures=True, save_seconds=1.0, **case)["useful_share"]
    assert found["data-parallel"] == pytest.approx([0.27], abs=0.03)
    assert found["elastic"] == pytest.approx([0.58], abs=0.01)
    assert found["elastic islands (8)"] == pytest.approx([0.88], abs=0.04)
