"""Figures of each layer, by every method: as NumPy takes them of the checkpoints around a step; no bit changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gregale.cli import main
from gregale.tracking.metrics import metric_of
from tests.programs.tiny import EVALUATE, assert_same_state, lines, losses, saved_state

Arrays = dict[str, np.ndarray]

STEP = 6  # which is compared, and evaluated after
BETA = 0.9  # AdamW's first
METHODS = {
    "psdp": [*EVALUATE, "--inspect.granularity=array"],
    "diloco": [
        *["--mesh.data=4", "--mesh.model=1", "--batch.microbatches=1", "--data.sources.words.separator=e"],
        *["--sync.type=diloco", "--sync.period=4"],
    ],
}
INSPECT = [f"--inspect.every={STEP}", "--checkpoint.every=1", "--checkpoint.keep_last=12", "--log_every=5"]


@pytest.fixture(scope="module", params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def inspected(method, inputs) -> Path:
    """A run of each method, of which every checkpoint is kept and the steps 6 and 12 are inspected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", method, *INSPECT, *METHODS[method]]) == 0
    return inputs / "runs" / method


def part_of(state: Arrays, part: str) -> Arrays:
    """The arrays below a part of a state, by their path in the model."""
    return {name.partition(f"{part}/")[2]: array for name, array in state.items() if f"{part}/" in name}


def norms_of(arrays: Arrays, by_array: bool, lanes: bool) -> dict[str, np.ndarray]:
    """Norms [replica] by layer or by array; of all together under no name.

    - `lanes`: the arrays have a first axis of replicas
    """
    squares: dict[str, np.ndarray] = {}
    for path, array in arrays.items():
        values = array.astype(np.float64) if lanes else array.astype(np.float64)[None]
        top, *below = path.split("/")
        inside = "".join(f".{word}" for word in below) if by_array else ""
        parts = {f"{top}{inside}": values}
        if top == "blocks":
            parts = {f"layer.{layer}{inside}": values[:, layer] for layer in range(values.shape[1])}
        for name, part in parts.items():
            square = (part**2).reshape(len(part), -1).sum(axis=1)
            squares[name], squares[""] = squares.get(name, 0) + square, squares.get("", 0) + square
    return {name: np.sqrt(square) for name, square in squares.items()}


def test_they_are_numpys_of_the_checkpoints_around_the_step(method, inspected):
    before, after = (saved_state(inspected, step) for step in (STEP - 1, STEP))
    (line,) = [line for line in lines(inspected) if line["step"] == STEP and "loss" in line]
    norms = partial(norms_of, by_array=method == "psdp", lanes=method == "diloco")
    old, new = (part_of(state, "inner/parameters" if method == "diloco" else "parameters") for state in (before, after))
    weights, updates = norms(old), norms({name: new[name] - old[name] for name in old})
    # What the optimizer was given: mu_t = beta mu_{t-1} + (1 - beta) g_t, with g_t clipped to a norm of 1.
    first, second = (part_of(state, "mu") for state in (before, after))
    clipped = norms({name: (second[name] - BETA * first[name]) / (1 - BETA) for name in first})
    assert weights.keys() == clipped.keys()
    assert len(weights) > 4
    for name in weights:
        part = f"/{name}" if name else ""
        assert line[f"parameter_norm{part}"] == pytest.approx(weights[name].mean(), rel=1e-5), name
        assert line[f"update_ratio{part}"] == pytest.approx((updates[name] / weights[name]).mean(), rel=1e-3), name
        if method != "diloco":  # there each replica's gradient is clipped by a norm of its own
            scale = max(line["grad_norm"], 1.0)
            assert line[f"grad_norm{part}"] == pytest.approx(scale * clipped[name].item(), rel=1e-4), name
        assert line[f"grad_norm{part}"] > 0
    assert line["attention_logit_max"] == line["attention_logit_max/layer.0"] > 0
    assert line["inspection_seconds"] > 0


@pytest.mark.parametrize("method", ["psdp"], indirect=True, scope="module")  # as the undisturbed run is
def test_no_bit_of_a_run_is_another(whole, inspected):
    assert_same_state(inspected, whole, 12)
    assert losses(inspected) == [(step, loss) for step, loss in losses(whole) if step in (5, 6, 10, 12)]
    evaluations = [[line for line in lines(run) if "eval_loss" in line] for run in (inspected, whole)]
    assert evaluations[0] == evaluations[1]


def test_all_figures_are_documented(inspected, whole):
    for line in (*lines(whole), *lines(inspected)):
        assert [name for name in line if name != "step" and metric_of(name) is None] == []
