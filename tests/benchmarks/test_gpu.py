"""`benchmarks/gpu.py` with tiny models on a CPU, and what it makes of rows that fail."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gregale.model.llama import parameter_count

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # as `python benchmarks/gpu.py` has it
        yield importlib.import_module("gpu")


def tiny(gpu, side: str, *how: str, packed: bool = False):
    return gpu.Case(replace(gpu.SHAPES["124m"], **gpu.SMALL), side, how, packed)


def test_a_row_is_a_step_of_the_real_program(gpu):
    row = gpu.measured(tiny(gpu, "gregale", "xla", "context", packed=True), steps=2)
    assert row["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert 0 < row["median_s"] <= row["slowest_s"]
    assert row["peak_bytes"] > 4 * 3 * 256 * 64, "the embedding and its moments at the least"
    assert row["flops_per_token"] == 6 * (2 * (4 * 64**2 + 3 * 64 * 128) + 256 * 64 + 5 * 64) + 12 * 2 * 64 * 64


def test_torchs_row_is_of_the_same_model(gpu):
    pytest.importorskip("torch")
    row = importlib.import_module("torch_gpu").measured(asdict(tiny(gpu, "torch", "eager")), 2, "cpu")
    assert row["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert row["median_s"] > 0


def test_a_row_that_fails_says_why_and_the_others_go_on(gpu, tmp_path):
    def row(script: str, limit_s: float = 30):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        arguments = Namespace(torch=str(path), steps=1, platform="cpu")
        return gpu.measured_apart(tiny(gpu, "torch", "eager"), arguments, limit_s)

    raised = "echo 'Traceback' >&2; echo 'torch.OutOfMemoryError: CUDA out of memory' >&2; echo 'a warning' >&2; exit 1"
    rows = [
        row(raised),
        row("exit 3"),
        row("exec sleep 60", limit_s=0.2),
        row("exit 0", limit_s=-1),
        row('echo noise; echo \'{"median_s": 0.5, "device": "NVIDIA H100 80GB HBM3"}\''),
    ]
    assert [each.get("error") for each in rows] == [
        "torch.OutOfMemoryError: CUDA out of memory",
        "exit code 3",
        "not done after 0 s",
        "not run: --budget is spent",
        None,
    ]
    assert "| CUDA out" not in gpu.table(rows[:4])
    assert rows[4]["median_s"] == 0.5


def test_torchs_utilisation_is_by_gregales_count(gpu):
    common = {"model": "1b", "tokens": 10_000, "median_s": 0.5, "device": "NVIDIA H100 80GB HBM3"}
    rest = {"slowest_s": 0.6, "compile_s": 30.0, "peak_bytes": 2**30, "loss": 10.8}
    rows = gpu.with_rates(
        [
            {**common, **rest, "step": "gregale", "flops_per_token": 6e9},
            {**common, **rest, "step": "torch", "median_s": 1.0},
            {**common, **rest, "step": "elsewhere", "device": "cpu"},
        ]
    )
    assert [row.get("utilisation") for row in rows] == [
        pytest.approx(20_000 * 6e9 / 989.5e12),
        pytest.approx(10_000 * 6e9 / 989.5e12),
        None,
    ]
    assert gpu.table(rows).splitlines()[2:] == [
        "| 1b | gregale | 20,000 | 12.1% | 0.5000 | 0.6000 | 30.0 | 1.00 | 10.800 |",
        "| 1b | torch | 10,000 | 6.1% | 1.0000 | 0.6000 | 30.0 | 1.00 | 10.800 |",
        "| 1b | elsewhere | 20,000 | - | 0.5000 | 0.6000 | 30.0 | 1.00 | 10.800 |",
    ]


def test_every_row_has_figures_or_a_reason(gpu):
    """Rows of the whole table: their processes differ, their models do not."""
    cases = list(gpu.cases(["124m", "1b"], {}, torch=True))
    assert len({(case.shape.name, case.label) for case in cases}) == len(cases) == 12
    parameters = {case.shape.name: gpu.setup_of(replace(case, how=("xla", "full"))).model for case in cases}
    counts = {name: parameter_count(model) for name, model in parameters.items()}
    assert 120e6 < counts["124m"] < 128e6
    assert 0.95e9 < counts["1b"] < 1.1e9
