"""The search for rates and the tables of `benchmarks/diloco.py`, on losses that are known."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gregale.methods.config import PsdpConfig

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def diloco():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # as `python benchmarks/diloco.py` has it
        yield importlib.import_module("diloco")


@pytest.mark.parametrize("start", [1.0, 3.0, 5.0])
def test_a_rate_is_taken_when_its_neighbours_are_no_better(diloco, start):
    tried = []

    def loss(rate: float) -> float:
        tried.append(rate)
        return abs(rate - 3.2)

    assert diloco.climb(loss, (1.0, 2.0, 3.0, 4.0, 5.0), start) == 3.0
    assert {2.0, 4.0} <= set(tried), "both neighbours were tried"


def test_the_end_of_a_ladder_may_be_best_and_a_tie_stays(diloco):
    assert diloco.climb(lambda rate: -rate, (1.0, 2.0, 3.0), 2.0) == 3.0
    assert diloco.climb(lambda rate: 0.0, (1.0, 2.0, 3.0), 2.0) == 2.0


def test_outer_and_inner_rate_are_searched_in_turn(diloco):
    """The best of a bowl whose axes are turned, so that one sweep of each rate is not enough."""

    class Bowl:
        def run(self, inner, sync, rates, seed):
            x, y = np.log2(rates.inner / 1e-3), 0.0 if rates.outer is None else np.log2(rates.outer / 0.5)
            return run(diloco, x**2 + y**2 + x * y)

    tuning = diloco.Tuning(Bowl(), "adamw")
    found = tuning.both(diloco.FIRST, diloco.Rates(8e-3, 0.2))
    assert found == diloco.Rates(1e-3, 0.5)
    assert all(rates.outer for rates in tuning.tried[diloco.FIRST])


def test_runs_that_differ_have_names_that_differ(diloco, tmp_path):
    rates, psdp = diloco.Rates(1e-3, 0.5), PsdpConfig()
    plain = replace(rates, **diloco.PLAIN)
    runs = [(sync, each) for sync in diloco.METHODS.values() for each in (rates, plain)]
    runs += [(replace(diloco.METHODS[of], **changed), replace(rates, **other)) for of, changed, other in diloco.TRIALS]
    runs += [(psdp, diloco.Rates(1e-3)), (psdp, diloco.Rates(2e-3))]
    configs = [diloco.configured(inner, sync, each, 1, tmp_path) for sync, each in runs for inner in diloco.INNER]
    assert len({config.name for config in configs}) == len({repr(replace(config, name="same")) for config in configs})
    assert {config.optimizer.learning_rate for config in configs} == {1e-3, 2e-3}
    average = diloco.configured("muon", diloco.METHODS[diloco.FIRST], plain, 1, tmp_path).sync.outer
    assert (average.learning_rate, average.momentum, average.nesterov) == (1.0, 0.0, False)


def test_a_trial_is_told_with_its_change_and_every_seed(diloco):
    class Known:
        def run(self, inner, sync, rates, seed):
            assert (sync.delay, rates.outer, rates.momentum) == (1, 1.0, 0.0)
            return run(diloco, 1.0 + seed)

    chosen = {diloco.STREAMING: diloco.Rates(1e-3, 0.5)}
    line = diloco.Tuning(Known(), "muon").trial(diloco.STREAMING, {"delay": 1}, diloco.PLAIN, chosen, [3])
    assert line == ("muon, streaming, H 30, delay 1, 0.001 and 1, no momentum: 1.0000 (seed 0), 4.0000 (seed 3)")


def test_the_table_has_gaps_by_seed_and_bytes_of_whole_runs(diloco):
    chosen = {"PSDP": diloco.Rates(1e-3), "DiLoCo, H 10": diloco.Rates(5e-4, 0.5)}
    results = {
        "PSDP": [run(diloco, 1.0, 8_000_000), run(diloco, 2.0, 8_000_000)],
        "DiLoCo, H 10": [run(diloco, 1.25, 800_000), run(diloco, 2.5, 800_000)],
    }
    *_, psdp, row = diloco.table("adamw", chosen, results)
    assert psdp == "| adamw | PSDP | 0.001 |  | 1.5000 |  | 8.0 MB | 1.0 |"
    assert row == "| adamw | DiLoCo, H 10 | 0.0005 | 0.5 | 1.8750 | +0.3750 (+0.2500, +0.5000) | 0.8 MB | 10.0 |"


def test_the_picture_has_a_row_for_each_inner_optimizer(diloco, tmp_path):
    found = {"PSDP": [run(diloco, 1.0, 8_000_000)], "DiLoCo, H 10": [run(diloco, 1.25, 800_000)]}
    diloco.draw(tmp_path / "picture.svg", {"adamw": found, "muon": found})
    assert "muon: held-out loss, nats" in (tmp_path / "picture.svg").read_text()


def run(diloco, loss: float, bytes_sent: int = 1):
    return diloco.Run(np.array([1024, 2048]), np.array([0, bytes_sent]), np.array([3.0, loss]))
