"""What is observed of a run: figures of its layers, a trace of some steps, utilisation; no bit of it changes."""

import gzip
import json
from functools import partial
from pathlib import Path
from socket import gethostname

import jax
import numpy as np
import pytest

from gregale.cli import main
from gregale.cost import chips
from gregale.cost.chips import CHIPS, OF_KIND, of_device
from gregale.errors import UserError
from gregale.programs.train.step_log import peak_tokens_per_second
from gregale.runs.config import InspectConfig
from gregale.tracking.metrics import metric_of
from gregale.tracking.profile import ENDINGS, MAX_STEPS, Window
from tests.cost.steps import lowered_step, small_setup
from tests.programs.tiny import EVALUATE, assert_same_state, lines, losses, saved_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Arrays = dict[str, np.ndarray]

STEP = 6  # which is compared, and evaluated after
BETA = 0.9  # AdamW's first
METHODS = {
    "psdp": [*EVALUATE, "--inspect.granularity=array", "--profile=5:7"],
    "diloco": [
        *["--mesh.data=4", "--mesh.model=1", "--batch.microbatches=1", "--data.sources.words.separator=e"],
        *["--sync.type=diloco", "--sync.period=4", "--steps=6"],
    ],
}
INSPECT = [f"--inspect.every={STEP}", "--checkpoint.every=1", "--checkpoint.keep_last=12", "--log_every=5"]


@pytest.fixture(scope="module")
def observed(inputs) -> dict[str, Path]:
    """A run of each method, as on a known chip: every checkpoint is kept, every 6th step is inspected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        patch.setitem(chips.OF_KIND, "cpu", "v7x")
        for method, options in METHODS.items():
            assert main(["train", "tiny.yaml", "--name", method, *INSPECT, *options]) == 0
    return {method: inputs / "runs" / method for method in METHODS}


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


@pytest.mark.parametrize("method", METHODS)
def test_figures_are_numpys_of_the_checkpoints_around_the_step(method, observed):
    inspected = observed[method]
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


def test_no_bit_of_a_run_is_another(whole, observed):
    run = observed["psdp"]
    assert_same_state(run, whole, 12)
    assert losses(run) == [(step, loss) for step, loss in losses(whole) if step in (5, 6, 10, 12)]
    evaluations = [[line for line in lines(each) if "eval_loss" in line] for each in (run, whole)]
    assert evaluations[0] == evaluations[1]
    for line in (*lines(whole), *lines(run), *lines(observed["diloco"])):
        assert [name for name in line if name != "step" and metric_of(name) is None] == [], "all are documented"


def test_the_program_of_a_step_is_the_same():
    one, other = (small_setup((2, 2, 1), others={"inspect": InspectConfig(every)}) for every in (None, 1))
    assert one.config.inspect != other.config.inspect
    assert lowered_step(one).as_text() == lowered_step(other).as_text()


def test_utilisation_is_in_the_log_where_the_chip_is_known(whole, observed):
    assert set(OF_KIND.values()) == set(CHIPS)
    assert of_device("TPU v5 lite") is CHIPS["v5e"]
    assert of_device("cpu") is of_device("NVIDIA H100 PCIe") is None
    assert peak_tokens_per_second(small_setup((1, 1, 1))) is None
    assert not any("mfu" in line for line in lines(whole))
    weights = 4 * 32 * 32 + 3 * 32 * 64 + 32 * 320  # projections, feed-forward, head
    flops = 6 * weights + 12 * 1 * 32 * (1 + 32) / 2  # of 32 positions, those that a query sees
    for line in lines(observed["psdp"]):
        if "loss" in line:
            assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / (8 * 2307e12 / 2))


def test_others_can_read_the_trace(observed):
    folder = observed["psdp"] / "profiles" / "steps-5-7"
    assert [path.name for path in folder.iterdir()] == ["plugins"], "nothing unfinished is left"
    found = sorted((folder / "plugins" / "profile" / "steps-5-7").iterdir())
    assert [path.name for path in found] == [f"{gethostname()}-process-0{ending}" for ending in sorted(ENDINGS)]
    files = dict(zip(sorted(ENDINGS), found, strict=True))
    with gzip.open(files[".trace.json.gz"]) as file:  # Perfetto and Chrome
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert {event["args"]["step_num"] for event in spans if event["name"] == "train"} == {"5", "6", "7"}
    profile = jax.profiler.ProfileData.from_file(str(files[".xplane.pb"]))  # xprof and TensorBoard
    names = {event.name for plane in profile.planes for line in plane.lines for event in line.events}
    assert "train" in names
    assert any("dot" in name for name in names), "single operations are there"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5:", "it has to be START:STOP, the first and the last step to trace, for example 20:22"),
        ("0:3", "steps are counted from 1"),
        ("7:5", "step 5 comes before step 7"),
        ("5:1001", "the run has 1000 steps"),
        (f"1:{MAX_STEPS + 1}", f"that is {MAX_STEPS + 1} steps"),
    ],
)
def test_a_wrong_window_is_one_line(text, message):
    with pytest.raises(UserError, match=r"^profile is ") as raised:
        Window.parse(text, 1000)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 200


def test_a_window_beyond_the_run_is_refused_and_one_that_is_done_is_passed_over(gregale, inputs, whole, capsys):
    assert gregale("train", "tiny.yaml", "--name", "never", "--profile", "5:13") == 2
    assert "profile is 5:13, but the run has 12 steps (`steps`)." in capsys.readouterr().err
    assert not (inputs / "runs" / "never").exists()
    # A scheduler starts the same command again.
    assert gregale("train", "tiny.yaml", "--name", "whole", "--steps", "13", "--profile", "5:7") == 0
    assert "Nothing is traced: the steps 5-7 of --profile were done before." in capsys.readouterr().out
    assert not (whole / "profiles").exists()
