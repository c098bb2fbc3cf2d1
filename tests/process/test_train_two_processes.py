"""Two processes with four devices each train what one process with eight does: DiLoCo, a replica in each process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.ports import free_port
from tests.programs.tiny import finished, lines, losses, saved_state, start_train, write_inputs

# The quickstart in its shape, shrunk in every size but the mesh, the heads and the microbatches.
SETTINGS = [
    *["--steps", "8", "--cpu_devices", "8", "--model.layers", "4", "--model.heads", "4", "--model.mlp", "96"],
    *["--batch.size", "32", "--batch.microbatches", "4"],
    *["--evaluation.every", "4", "--evaluation.batches", "2", "--samples.prompts", "[the wind, '']"],
    *["--samples.tokens", "8", "--samples.temperature", "0", "--sync.type", "diloco", "--sync.period", "2"],
]

FIGURES = {"loss_0", "loss_1", "loss_spread", "grad_norm", "outer_grad_norm", "outer_grad_cosine"}

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
def outputs(inputs, one) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each of the two processes of the run in `two`."""
    return in_two_processes(inputs, *SETTINGS, "--runs", "two")


def in_two_processes(inputs: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """A run in two processes that share its devices; what each of them left."""
    join = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", "2"]
    processes = [start_train(inputs, *arguments, *join, "--distributed.process", str(rank)) for rank in range(2)]
    try:
        return [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def two(inputs, outputs) -> Path:
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    return inputs / "two" / "tiny"


def test_the_losses_are_those_of_one_process(one, two):
    assert [step for step, _ in losses(two)] == list(range(1, 9)), "one process wrote each line once"
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-6)
    assert [line["step"] for line in lines(two) if "eval_loss" in line] == [4, 8]
    for key in ("eval_loss", "bits_per_byte"):
        found, expected = ([line[key] for line in lines(run) if key in line] for run in (two, one))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_figures_of_both_replicas_reach_the_process_that_writes(one, two):
    for mine, expected in zip(lines(two), lines(one), strict=True):
        assert mine.keys() == expected.keys()
        for key in FIGURES & mine.keys():
            assert mine[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert [line["step"] for line in lines(two) if "outer_grad_cosine" in line] == [2, 4, 6, 8]


def test_the_states_agree(one, two):
    found, expected = saved_state(two, 8), saved_state(one, 8)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_only_the_first_process_writes(outputs, two):
    (_, first, _), (_, second, _) = outputs
    assert "Done. Held-out loss" in first
    assert GLOO.sub("", second) == ""
    assert (two / "samples.txt").read_text().count("--- step") == 4, "two prompts at two evaluations"
    assert {path.name for path in two.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "samples.txt",
        "checkpoints",
        "newest_checkpoint.json",
        "starts.jsonl",
        "tokenizer.json",
    }


def test_samples_are_those_of_one_process(one, two):
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
