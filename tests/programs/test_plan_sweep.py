"""What a plan computes for steps of public models, beside the TPU compiler and a count by hand."""

import pytest

from benchmarks.plan_sweep import SWEEP, plan_of, ratios


@pytest.mark.soak
@pytest.mark.parametrize("row", SWEEP, ids=str)
def test_flops_are_those_by_hand_and_bounds_are_below_the_compiler(row):
    found = ratios(plan_of(row))
    assert found.flops == pytest.approx(1, abs=0.01)
    assert found.memory <= 1
    assert found.seconds <= 1
