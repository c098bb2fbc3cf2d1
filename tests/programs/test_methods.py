"""Methods through `gregale train`: stopped where it is hard, evaluated, and gone on with otherwise.

Of each method there is one run; `test_train.py` has the run of exact PSDP. Two of them are quantised.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from gregale.checkpoint.store import Checkpoints
from gregale.cli import main
from gregale.cost.collectives import audit
from gregale.methods.diloco import Diloco
from gregale.methods.schedule import Schedule
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.trained_model import checkpoint_template, open_trained
from gregale.programs.train.resume import converted
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.programs.tiny import assert_same_state, checkpoint_steps, killed, lines, losses, saved_state

STEPS, STOPPED, JOINED = 12, 6, 8
STREAMING = Schedule(period=4, fragments=2, delay=3, layers=1)
COMMON = [
    *["--mesh.data", "4", "--mesh.model", "1", "--batch.microbatches", "1", "--data.sources.words.separator=e"],
    *["--checkpoint.every", "2", "--checkpoint.keep_last", "9", "--average", "{decay: 0.7, every: 2}"],
]
DILOCO = ["--sync.type", "diloco", "--sync.period", "4"]
FIRST_PHASE = ["--reduce.codec=int4", "--reduce.measure=true"]
FOUR_BITS = [*FIRST_PHASE, "--reduce.gather_codec=int4"]
SETTINGS = {
    "psdp": [*COMMON, *FOUR_BITS],
    "diloco": [*COMMON, *DILOCO],
    "streaming": [
        *[*COMMON, "--sync.type", "streaming_diloco", "--sync.period", "4", "--sync.fragments", "2"],
        *["--sync.delay", "3", "--sync.alpha", "0.25", "--sync.dropout", "0.3", "--log_every", "2"],
        *["--data.sources.more", "{type: text, files: ['text/[0-3].txt']}", *FIRST_PHASE, "--reduce.phases=1"],
        *["--data.replica_mixtures", "[{words: 1.0}, {words: 3.0, more: 1.0}]"],
        *["--stages", "[{from: 8, batch: {sequence_length: 24}}]"],
    ],
}


def train(folder: Path, run: Path, *arguments: str) -> int:
    """The command line, in the folder of the inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return main(["train", "tiny.yaml", "--name", run.name, "--runs", str(run.parent), *arguments])


@pytest.fixture(scope="module", params=SETTINGS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def never_stopped(inputs, kind) -> Path:
    run = inputs / "runs" / kind
    assert train(inputs, run, *SETTINGS[kind]) == 0
    return run


@pytest.mark.parametrize("kind", ["psdp", "streaming"], indirect=True, scope="module")
def test_a_stop_changes_no_bit(inputs, kind, never_stopped, tmp_path, capsys, monkeypatch):
    joins, to_psdp = [], Diloco.to_psdp
    monkeypatch.setattr(Diloco, "to_psdp", lambda *given: joins.append(given) or to_psdp(*given))
    stopped = killed(never_stopped, tmp_path / kind, STOPPED)
    assert checkpoint_steps(stopped) == [2, 4, STOPPED]
    assert train(inputs, stopped, *SETTINGS[kind]) == 0
    assert len(joins) == 2 * (kind == "streaming"), "checkpoints have joined parameters, by one program in each stage"
    out = capsys.readouterr().out
    assert f"Going on after step {STOPPED} of {STEPS}" in out
    assert_same_state(stopped, never_stopped, STEPS)
    assert losses(stopped) == losses(never_stopped)
    assert lines(stopped)[-1] == lines(never_stopped)[-1], "the outer parameters' held-out loss"
    names = saved_state(stopped, STEPS).keys()
    of_diloco = ("inner/sharded/", "outer/parameters/", "outer/optimizer/", "seen")
    for part in ("sharded/", "error/first") if kind == "psdp" else of_diloco:
        assert any(name.startswith(f"method/{part}") for name in names), names


def test_the_average_of_the_parameters(kind, never_stopped, evaluated, tmp_path):
    """By NumPy from the parameters of all checkpoints, which come as often; those after the last outer step."""
    states = {step: saved_state(never_stopped, step) for step in range(2, STEPS + 1, 2)}
    names = [name.removeprefix("average/parameters/") for name in states[2] if name.startswith("average/parameters/")]
    assert names
    of = "method/parameters" if kind == "psdp" else "method/outer/parameters"
    weights = 0.7 ** np.arange(len(states))[::-1]
    for name in names:
        thetas = [
            state[f"{of}/{name}"] + state.get(f"method/outer/pending/{name}", 0 * state[f"{of}/{name}"])
            for state in states.values()
        ]
        expected = np.average(np.stack(thetas).astype(np.float64), axis=0, weights=weights)
        found = states[STEPS][f"average/parameters/{name}"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    read = open_trained(str(never_stopped), STEPS, 1, average=True).model
    np.testing.assert_array_equal(np.asarray(read.head.array), states[STEPS]["average/parameters/head"])
    text = (never_stopped / "config.yaml").read_text()
    run = killed(never_stopped, tmp_path / kind, STEPS - 2)
    (run / "config.yaml").write_text(text.replace("  evaluate: false", "  evaluate: true"))
    assert evaluated(never_stopped, "--average", "--step", STEPS - 2) == evaluated(run)


def test_nothing_is_sent_for_the_average(kind, never_stopped):
    """Over any axis: it is sharded as the optimizer's state."""
    setup = set_up(load(TrainConfig, never_stopped / "config.yaml"), tokens=257)
    program = setup.stepper().add.lower(setup.abstract_state()).compile()
    assert audit(program, setup.layout.mesh).collectives == ()


def test_the_stop_was_where_it_is_hard(kind, never_stopped):
    """Replicas apart, weighted unevenly; in streaming a fragment is on its way, another one is about to be sent.

    With four bits, there are errors that were not sent yet.
    """
    state = saved_state(never_stopped, STOPPED)
    kept = {"psdp": ["error/first"], "diloco": [], "streaming": ["error/first", "outer/pending"]}
    for part in kept[kind]:
        assert any(np.any(array) for name, array in state.items() if part in name), part
    if kind == "psdp":
        return
    for name, array in state.items():
        if name.startswith("method/inner/parameters"):
            assert np.abs(array[0] - array[1]).max() > 1e-4, name
    seen = state["method/seen"]  # [fragment, replica]
    assert (seen[:, 0] != seen[:, 1]).all()
    assert [STREAMING.sent(step) for step in range(4, 8)] == [1, None, 0, None]
    assert [STREAMING.applied(step) for step in range(6, 10)] == [None, 1, None, 0]


@pytest.mark.parametrize("kind", ["diloco", "streaming"], indirect=True, scope="module")
def test_figures_of_every_replica_and_of_what_was_sent(kind, never_stopped):
    """A line has what was sent since the one before; streaming sends in odd steps here, its lines are of even ones."""
    logged = {line["step"]: line for line in lines(never_stopped) if "loss" in line}
    for line in logged.values():
        own = [line["loss_0"], line["loss_1"]]
        assert line["loss_spread"] == pytest.approx(max(own) - min(own))
        assert min(own) <= line["loss"] <= max(own)
    sent = [step for step, line in logged.items() if "outer_grad_norm" in line]
    assert sent == ([4, 8, 12] if kind == "diloco" else [4, 6, 8, 10, 12])
    found = [line["outer_grad_cosine"] for line in logged.values() if "outer_grad_cosine" in line]
    assert (len(found) == 3) if kind == "diloco" else (1 <= len(found) < 5), "dropout leaves one alone, or none"
    assert all((0.1 if kind == "diloco" else -1.05) < cosine < 1.05 for cosine in found)
    norms = [logged[step]["outer_grad_norm"] for step in sent]
    assert all(norms) if kind == "diloco" else any(norms)


@pytest.mark.parametrize("kind", ["psdp", "streaming"], indirect=True, scope="module")
def test_what_is_lost_is_measured_beside_the_held_out_loss(never_stopped):
    (evaluation,) = [line for line in lines(never_stopped) if "eval_loss" in line]
    assert 0.02 < evaluation["quantisation_error"] < 0.3, "4 bits: 0.1 for normal values"
    assert evaluation["feedback_norm"] > 0


@pytest.mark.parametrize("kind", ["psdp"], indirect=True, scope="module")
def test_a_quantised_run_goes_on_without_its_errors_if_it_is_exact_and_with_others_on_another_mesh(
    inputs, never_stopped, tmp_path
):
    run, stop = killed(never_stopped, tmp_path / "psdp", STEPS - 2), STEPS - 2
    assert train(inputs, run, *COMMON) == 0
    assert losses(run)[:stop] == losses(never_stopped)[:stop]
    np.testing.assert_allclose(losses(run), losses(never_stopped), atol=0.3)
    assert not any("error/first" in name for name in saved_state(run, STEPS))
    sent = [line["replica_bytes"] for line in lines(run) if "loss" in line]
    assert (sent[-1] - sent[-2]) / sent[0] > 4, "parameters are few here, so that blocks are not full"
    setup = set_up(load(TrainConfig, never_stopped / "config.yaml", ["--mesh.replica=4", "--mesh.data=2"]), tokens=257)
    with Checkpoints(never_stopped / "checkpoints") as checkpoints:
        tree = checkpoints.latest(lambda metadata: checkpoint_template(setup, metadata), partial=lambda _: True).tree
    state, wanted = converted(setup, tree, STEPS, setup.method), setup.abstract_state()
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == [leaf.sharding for leaf in jax.tree.leaves(wanted)]
    errors = jax.tree.leaves(state.method.error)
    assert errors
    assert not any(np.any(error) for error in errors)


@pytest.mark.parametrize("kind", ["diloco"], indirect=True, scope="module")
def test_other_replicas_are_refused_and_taken_through_psdp(inputs, never_stopped, tmp_path, capsys):
    four = [*DILOCO, "--mesh.replica", "4", "--mesh.data", "2"]
    diloco = killed(never_stopped, tmp_path / "joined", JOINED)
    assert train(inputs, diloco, *COMMON, *four) == 2
    error = capsys.readouterr().err
    assert "mesh.replica is 4, but the checkpoint is of diloco with 2 replicas" in error
    assert "Resume with mesh.replica 2" in error
    assert "first resume with sync.type psdp" in error
    assert error.count("\n") == 1

    # Step 8 joined the replicas: what follows starts from the outer parameters, by DiLoCo or by PSDP.
    assert train(inputs, diloco, *COMMON) == 0
    psdp_losses = dict(losses(diloco))
    assert psdp_losses[JOINED + 1] == pytest.approx(dict(losses(never_stopped))[JOINED + 1], rel=1e-6)

    # Killed before its first checkpoint by PSDP, it has PSDP in config.yaml, and a checkpoint of DiLoCo.
    between = killed(diloco, tmp_path / "between", JOINED)
    assert "type: psdp" in (between / "config.yaml").read_text()
    assert train(inputs, between, *COMMON) == 0
    assert losses(between) == losses(diloco)

    psdp = killed(diloco, tmp_path / "psdp", JOINED + 2)
    assert train(inputs, psdp, *COMMON, *four) == 0
    assert f"Going on after step {JOINED + 2} of {STEPS}." in capsys.readouterr().out
    assert dict(losses(psdp))[JOINED + 3] == pytest.approx(psdp_losses[JOINED + 3], rel=1e-6), "all start from PSDP's"
    assert saved_state(psdp, STEPS)["method/seen"].shape == (1, 4)


def test_a_checkpoint_is_evaluated_as_the_run_was(kind, never_stopped, evaluated):
    """Also on one device, and though fragments are still to be sent from replicas that only the run's mesh has."""
    waits = kind == "streaming"
    assert any(name.startswith("joined/") for name in saved_state(never_stopped, STEPS)) == waits
    assert evaluated(never_stopped)["eval_loss"] == pytest.approx(lines(never_stopped)[-1]["eval_loss"], rel=1e-6)
    one = open_trained(str(never_stopped), STEPS, devices=1).model
    whole = open_trained(str(never_stopped), STEPS, devices=None).model
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("kind", ["diloco"], indirect=True, scope="module")
def test_a_run_that_ends_between_synchronisations_is_read_after_one_more(
    inputs, never_stopped, evaluated, tmp_path, capsys
):
    """By NumPy from the state of its checkpoint, which stays as it is: steps 5 and 6 of period 4, weighed by tokens."""
    run = killed(never_stopped, tmp_path / "between", STOPPED)
    assert train(inputs, run, *SETTINGS["diloco"], "--steps", str(STOPPED)) == 0
    assert f"The last synchronisation comes after step 4 of {STOPPED}. Evaluations, " in capsys.readouterr().out
    state = saved_state(run, STOPPED)
    share = (state["method/seen"] / state["method/seen"].sum())[0]
    read = open_trained(str(run), STOPPED, devices=1).model
    theta, before = state["method/outer/parameters/head"], state["method/outer/optimizer/0/1/trace/head"]
    gradient = theta - np.tensordot(share, state["method/inner/parameters/head"], 1)
    momentum = 0.9 / 10  # the second of ten outer steps over which it rises
    expected = theta - 0.7 * (gradient + momentum * (momentum * before + gradient))
    np.testing.assert_allclose(np.asarray(read.head.array), expected, rtol=1e-4, atol=1e-6)
    assert evaluated(run)["eval_loss"] == pytest.approx(lines(run)[-1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["diloco"], indirect=True, scope="module")
def test_the_model_is_sampled_on_one_device_and_evaluated_as_in_the_run(evaluated, never_stopped, tmp_path, capsys):
    assert main(["sample", str(never_stopped), "the wind", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the wind")
    found = {}
    for which in ("outer", "average", "first_replica"):
        run = killed(never_stopped, tmp_path / which, STOPPED)
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("evaluate: outer", f"evaluate: {which}"))
        found[which] = evaluated(run, "--batches", "1")["eval_loss"]
    assert len(set(found.values())) == 3, "in the middle of a period they are three models"
