"""Runs of PSDP with delayed updates through the command line: they go on where they stopped, with what waits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gregale.cli import main
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.programs import STEP
from gregale.programs.plan.report import report_of
from gregale.programs.plan.shapes import estimate, tree_bytes
from gregale.programs.plan.step import plan_step
from gregale.services.config import TrainConfig
from gregale.services.parsing import load
from tests.programs.tiny import assert_same_state, lines, losses, saved_state

STEPS, STOP = 5, 3
COMMON = ["--mesh.data=4", "--mesh.model=1", f"--steps={STEPS}", "--batch.microbatches=1", "--checkpoint.every=1"]
DELAYED = ["--sync.type=delayed_psdp", "--sync.delay=2", "--reduce.codec=int4", "--reduce.second_leg=int8"]


@pytest.fixture(scope="module")
def delayed(inputs) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", "delayed", *COMMON, *DELAYED]) == 0
    return inputs / "runs" / "delayed"


@pytest.fixture
def resumed(delayed, gregale, tmp_path):
    """A copy of the run as a kill after step STOP leaves it, gone on with some options."""

    def go_on(*options: str) -> Path:
        run = tmp_path / "runs" / delayed.name
        shutil.copytree(delayed, run)
        for step in range(STOP + 1, STEPS + 1):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
        (run / "newest_checkpoint.json").unlink()
        kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:STOP]
        (run / "metrics.jsonl").write_text("".join(kept))
        assert gregale("train", "tiny.yaml", "--name", run.name, "--runs", run.parent, *COMMON, *options) == 0
        return run

    return go_on


def test_a_run_goes_on_bit_for_bit_with_what_waits(delayed, resumed):
    waiting = saved_state(delayed, STOP)
    for name in ("method/sums/", "method/updates/", "method/psdp/error/first"):
        assert any(np.any(array) for path, array in waiting.items() if path.startswith(name)), name
    run = resumed(*DELAYED)
    assert_same_state(run, delayed, STEPS)
    assert losses(run) == losses(delayed)


@pytest.mark.parametrize(
    "options",
    [[*DELAYED, "--mesh.replica=4", "--mesh.data=2"], ["--sync.type=delayed_psdp"]],
    ids=["another mesh", "another delay, exact averages"],
)
def test_a_run_goes_on_otherwise_without_what_waited(delayed, resumed, options):
    run = resumed(*options)
    assert losses(run)[:STOP] == losses(delayed)[:STOP]
    np.testing.assert_allclose(losses(run), losses(delayed), atol=0.3)


def test_a_checkpoint_is_evaluated_as_the_run_was(delayed, gregale, capsys):
    assert gregale("eval", delayed, "--json") == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(lines(delayed)[-1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("delay", "more"),
    [
        (0, []),
        (1, ["--sync.type=delayed_psdp", "--reduce.codec=int4"]),
        (2, ["--sync.type=delayed_psdp", "--sync.delay=2"]),
    ],
)
def test_plan_tells_what_waits_and_what_is_sent(inputs, delay, more, monkeypatch, compiled_anew):
    """Traffic as compiled equals the closed form; of memory there is a buffer more, and of updates a shard of one."""
    del compiled_anew
    monkeypatch.chdir(inputs)
    config = load(TrainConfig, "tiny.yaml", [*COMMON, "--cpu_devices=8", *more])
    plan = plan_step(config, 257, simulated_target(config, None, None))
    report = report_of(plan, 257, None)["programs"][STEP]
    compiled = {axes: size for axes, size in report["bytes_per_step"]["axes"].items() if axes}
    assert compiled == report["closed_form_bytes_per_step"]
    found = tree_bytes(plan.setup)
    assert found.delayed == (0, found.gradients, found.gradients * 3 // 2)[delay]
    assert plan.step.memory.arguments == found.arguments
    assert plan.step.memory.peak >= estimate(plan.setup, plan.target.backend).arguments
