"""Two processes with four devices each train what one process with eight does: DiLoCo, a replica in each process."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.process.two import gregale_in_two
from tests.programs.tiny import finished, lines, losses, saved_state, start_train, write_inputs

# The quickstart in its shape, shrunk in every size but the mesh and the heads.
SETTINGS = [
    *["--steps", "4", "--cpu_devices", "8", "--model.layers", "2", "--model.heads", "4", "--model.mlp", "96"],
    *["--batch.size", "32", "--batch.microbatches", "2"],
    *["--evaluation.every", "2", "--evaluation.batches", "2", "--samples.prompts", "[the wind]"],
    *["--samples.tokens", "8", "--samples.temperature", "0", "--sync.type", "diloco", "--sync.period", "2"],
]
FIGURES = {"loss_0", "loss_1", "loss_spread", "grad_norm", "outer_grad_norm", "outer_grad_cosine"}
WRITTEN = ("config.yaml", "metrics.jsonl", "samples.txt", "checkpoints", "newest_checkpoint.json", "starts.jsonl")

# Gloo tells of its connections on standard output; its threads write in pieces that fall between one another.
GLOO = re.compile(
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d|\s"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def one(inputs) -> Path:
    code, _, errors = finished(start_train(inputs, *SETTINGS, "--runs", "one"))
    assert code == 0, errors
    return inputs / "one" / "tiny"


@pytest.fixture(scope="module")
def two(inputs, one) -> Path:
    outputs = gregale_in_two(inputs, "train", "tiny.yaml", *SETTINGS, "--runs", "two")
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert "Done. Held-out loss" in outputs[0][1]
    assert GLOO.sub("", outputs[1][1]) == "", "only the first process writes"
    return inputs / "two" / "tiny"


def test_its_files_are_those_of_one_process(one, two):
    assert {path.name for path in two.iterdir()} == {*WRITTEN, "tokenizer.json"}
    assert [step for step, _ in losses(two)] == [1, 2, 3, 4], "one process wrote each line once"
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-6)
    for mine, expected in zip(lines(two), lines(one), strict=True):
        assert mine.keys() == expected.keys()
        for key in {"eval_loss", "bits_per_byte"} & mine.keys():
            assert mine[key] == pytest.approx(expected[key], rel=1e-6), key
        for key in FIGURES & mine.keys():
            assert mine[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert [line["step"] for line in lines(two) if "eval_loss" in line] == [2, 4]
    assert [line["step"] for line in lines(two) if "outer_grad_cosine" in line] == [2, 4]
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert (two / "samples.txt").read_text().count("--- step") == 2, "one prompt at two evaluations"


def test_the_states_agree(one, two):
    found, expected = saved_state(two, 4), saved_state(one, 4)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_what_has_to_be_equal_is_refused_by_both_before_the_first_step(inputs):
    common = ("--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--runs", "refused")
    different = ("--optimizer.learning_rate", "0.02")
    found = gregale_in_two(inputs, "train", "tiny.yaml", *common, different=different)
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both give the same reason"
    assert not any("Traceback" in err for _, _, err in found)
    names = [rf"process {number} \([\w.-]+, pid \d+\)" for number in range(2)]
    (said,) = errors[0]
    assert re.search(r"optimizer\.learning_rate is 0\.01 in {}, but 0\.02 in {}".format(*names), said), said
    assert not (inputs / "refused").exists(), "nothing was begun"
