"""A pipelined run through the command line: it goes on without a pipeline, and is evaluated and sampled."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gregale.cli import main
from gregale.data.tokenizers import load_tokenizer
from gregale.inference.token_sampling import Sampling
from gregale.programs.runtime.trained_model import open_trained
from gregale.programs.sample.sampler import training_sampler
from tests.programs.test_sample import greedy_by_full_passes
from tests.programs.tiny import checkpoint_steps, lines, losses

STEPS, STOP = 4, 2
COMMON = [f"--steps={STEPS}", "--checkpoint.every=2", "--batch.microbatches=1", "--model.layers=4", "--mesh.model=1"]
TWO_STAGES = [*COMMON, "--mesh.stage=2", "--pipeline.repeats=2"]
NO_STAGES = [*COMMON, "--mesh.data=4"]


@pytest.fixture(scope="module")
def run(inputs) -> Path:
    """The directory of the undisturbed run, with two stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", "pipelined", *TWO_STAGES]) == 0
    return inputs / "runs" / "pipelined"


def test_a_run_goes_on_without_a_pipeline(run, gregale, tmp_path):
    """Checkpoints have the layers in the model's order, whatever the stages."""
    target = tmp_path / "runs" / run.name
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / f"step-{STEPS:08d}")
    kept = (target / "metrics.jsonl").read_text().splitlines(keepends=True)[:STOP]
    (target / "metrics.jsonl").write_text("".join(kept))
    assert checkpoint_steps(target) == [STOP]
    assert gregale("train", "tiny.yaml", "--name", run.name, "--runs", target.parent, *NO_STAGES) == 0
    assert [step for step, _ in losses(target)] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses(target), losses(run), rtol=0, atol=1e-5)


def test_it_is_evaluated_on_its_own_mesh(run, gregale, capsys):
    (evaluation,) = [line for line in lines(run) if "eval_loss" in line]
    assert gregale("eval", run.name, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == evaluation


def test_it_is_sampled_on_one_device(run, gregale, capsys):
    """By the command, and by a run, which has the model in stages."""
    prompt = "the wind "
    assert gregale("sample", run.name, prompt, "--temperature", "0", "--tokens", "8") == 0
    expected = greedy_by_full_passes(open_trained(str(run), None, devices=1), prompt, 8)
    assert capsys.readouterr().out == prompt + expected + "\n"
    in_stages = open_trained(str(run), None, devices=None)
    sampler = training_sampler(in_stages.setup, load_tokenizer(run))
    assert sampler.texts(sampler.prepared(in_stages.model), [prompt], 8, Sampling(0)) == [expected]
