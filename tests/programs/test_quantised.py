"""Runs whose averages are quantised, through the command line: they go on where they stopped, errors and all."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.programs.tiny import assert_same_state, lines, losses, saved_state

STEPS, STOP = 6, 4
FOUR_BITS = ["--reduce.codec=int4", "--reduce.second_leg=int4", "--reduce.measure=true"]
TWO_AXES = ["--mesh.data=4", "--mesh.model=1"]  # quicker to compile than with tensor parallelism
COMMON = [*TWO_AXES, f"--steps={STEPS}", "--checkpoint.every=2", "--batch.microbatches=1"]
STREAMING = [
    "--sync.type=streaming_diloco",
    "--sync.period=4",
    "--sync.fragments=2",
    "--sync.delay=3",
]


@pytest.fixture(scope="module")
def psdp(inputs, tmp_path_factory) -> Path:
    return undisturbed(inputs, "psdp", FOUR_BITS)


@pytest.fixture(scope="module")
def streaming(inputs) -> Path:
    return undisturbed(inputs, "streaming", [*FOUR_BITS, *STREAMING])


def undisturbed(inputs: Path, name: str, options: list[str]) -> Path:
    from gregale.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", name, *COMMON, *options]) == 0
    return inputs / "runs" / name


@pytest.fixture
def stopped(tmp_path):
    """A copy of a run as a kill after the checkpoint of step STOP leaves it."""

    def copy(run: Path) -> Path:
        target = tmp_path / "runs" / run.name
        shutil.copytree(run, target)
        for step in range(STOP + 1, STEPS + 1):
            shutil.rmtree(target / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
        kept = (target / "metrics.jsonl").read_text().splitlines(keepends=True)[: STOP + 1]
        (target / "metrics.jsonl").write_text("".join(kept))
        return target

    return copy


@pytest.fixture
def go_on(gregale):
    def train(run: Path, *options: str) -> int:
        return gregale("train", "tiny.yaml", "--name", run.name, "--runs", run.parent, *COMMON, *options)

    return train


def test_a_psdp_run_goes_on_bit_for_bit(psdp, stopped, go_on):
    run = stopped(psdp)
    assert any(np.any(array) for name, array in saved_state(run, STOP).items() if "error/first" in name)
    assert go_on(run, *FOUR_BITS) == 0
    assert_same_state(run, psdp, STEPS)
    assert losses(run) == losses(psdp)


def test_a_streaming_run_goes_on_bit_for_bit_with_a_fragment_on_its_way(streaming, stopped, go_on):
    """At step 4, fragment 0 is sent after step 2 and not yet applied: its update waits in the state."""
    run = stopped(streaming)
    waiting = [array for name, array in saved_state(run, STOP).items() if "outer/pending" in name]
    assert any(np.any(array) for array in waiting)
    assert go_on(run, *FOUR_BITS, *STREAMING) == 0
    assert_same_state(run, streaming, STEPS)
    assert losses(run) == losses(streaming)


@pytest.mark.parametrize(
    "options",
    [
        [*FOUR_BITS, "--mesh.replica=4", "--mesh.data=2"],
        [],
        ["--reduce.codec=int8", "--reduce.feedback=null"],
    ],
    ids=["another mesh", "exact", "another codec"],
)
def test_a_run_goes_on_otherwise_with_its_errors_begun_anew(psdp, stopped, go_on, options):
    run = stopped(psdp)
    assert go_on(run, *options) == 0
    assert losses(run)[:STOP] == losses(psdp)[:STOP]
    np.testing.assert_allclose(losses(run), losses(psdp), atol=0.3)
    has_errors = any("error/first" in name for name in saved_state(run, STEPS))
    assert has_errors == ("--reduce.codec=int4" in options)


def test_what_is_lost_is_measured_beside_the_held_out_loss(psdp, streaming):
    for run in (psdp, streaming):
        (evaluation,) = [line for line in lines(run) if "eval_loss" in line]
        assert 0.02 < evaluation["quantisation_error"] < 0.3, "4 bits: 0.1 for normal values"
        assert evaluation["feedback_norm"] > 0


def test_fewer_bytes_are_sent_than_by_an_exact_run(psdp, stopped, go_on):
    run = stopped(psdp)
    assert go_on(run) == 0
    sent = [line["replica_bytes"] for line in lines(run) if "loss" in line]
    quantised, exact = sent[0], sent[-1] - sent[-2]
    assert exact / quantised > 4, "parameters are few here, so that blocks are not full"
