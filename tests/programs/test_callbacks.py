"""Callbacks of the configuration: the order of their events, their metrics, and their mistakes."""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from gregale.programs.train.loop import Evaluation
from tests.plugins import EXAMPLES, plugins_from
from tests.programs.tiny import assert_same_state, checkpoint_steps, lines, trained

PLUGIN = ["--plugins", "recording", "--steps=4", "--evaluation.every=2", "--checkpoint.every=100"]
RECORDER = [*PLUGIN, "--callbacks", "[{type: recorder}]"]
METHODS = {
    "psdp": [],
    "diloco": ["--sync.type=diloco", "--sync.period=2", "--mesh.data=4", "--mesh.model=1", "--batch.microbatches=1"],
}


@pytest.fixture(scope="module", autouse=True)
def plugins():
    with plugins_from(Path(__file__).parent / "plugins"):
        yield


@pytest.fixture(scope="module")
def recorded(inputs, plugins) -> dict[str, tuple[Path, list[tuple]]]:
    """The directory of a run with each method, and its events."""
    found = {}
    for method, options in METHODS.items():
        run = trained(inputs, "tiny.yaml", f"own-{method}", *RECORDER, *options)
        found[method] = run, list(sys.modules["recording"].EVENTS)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_events_come_in_order_and_metrics_are_of_the_step(recorded, method):
    run, events = recorded[method]
    mean = next(event[2] for event in events if event[0] == "before")
    assert [event[:2] for event in events if event[0] not in ("start", "close")] == [
        *[("next", 1), ("next", 2)],
        *[("step", 1), ("step", 2), ("evaluation", 2), ("after", 2), ("evaluation", 2)],  # step 2 is waited for
        *[("next", 3), ("before", 3), ("next", 4)],
        *[("step", 3), ("step", 4), ("evaluation", 4), ("end", 4)],
    ], "no step but 2 and 3 waits: step 3 is read after step 4 has started"
    assert events[0][0] == "start"
    assert events[0][2:] == (0, True)
    assert events[-1] == ("close",)
    steps = {line["step"]: line for line in lines(run) if "loss" in line}
    (after,) = (line["own_after"] for line in lines(run) if "own_after" in line)
    assert steps[3]["own_before"] == after, "nothing comes between two steps"
    if "loss_0" not in steps[3]:  # one model for all replicas
        assert steps[3]["largest_weight"] == after
    np.testing.assert_allclose(steps[3]["token_mean"], mean, rtol=1e-6)
    assert "callback_seconds" in steps[4]


MISTAKES = {
    "raises": "Failing.on_step raised ZeroDivisionError (",
    "taken": "Failing.metrics returns 'step', which is no name or that of another metric; choose another.",
    "shape": "Failing.metrics returns 'mine' of the type ",
    "nothing": "Failing.metrics returns NoneType; it has to return a mapping of names to numbers.",
    "text": "Failing.after_step returns 'mine' of the type str and the shape (); give a number, such as a mean.",
    "build": "FailingConfig.build returns NoneType; it has to return a Callback.",
}
LATER = ("raises", "text")  # than the steps are compiled


@pytest.mark.parametrize(("how", "says"), MISTAKES.items())
def test_a_mistake_of_a_callback_is_one_line(refusal, monkeypatch, how, says):
    given = ["--callbacks", "[{type: failing}]" if how in LATER else f"[{{type: failing, how: {how}}}]"]
    monkeypatch.setattr(import_module("recording").Failing, "later", how)
    error = refusal("train", "tiny.yaml", "--name", f"failing-{how}", *PLUGIN, *given)
    assert f"callbacks: {says}" in error
    assert ("recording.py, line" in error) == (how == "raises")


def test_early_stopping_ends_a_run_as_complete_and_other_callbacks_go_on(gregale, printed, inputs, capsys):
    with plugins_from(EXAMPLES):
        given = ["tiny.yaml", "--name", "early", "--plugins", "early_stopping,recording", "--evaluation.every=2"]
        rules = "{type: early_stopping, patience: 2, margin: 10}"  # no loss is that much smaller than the first
        stopping = ["--callbacks", f"[{rules}, {{type: recorder}}]"]
        assert gregale("train", *given, *stopping) == 0
        why = "2 evaluations in a row have found no eval_loss below "
        out = capsys.readouterr().out
        assert f"A callback ended the run after step 7 of 12: {why}" in out
        assert out.splitlines()[-2].startswith("Done. Held-out loss ")
        run = inputs / "runs" / "early"
        assert checkpoint_steps(run)[-1] == 7
        assert [line["step"] for line in lines(run) if "eval_loss" in line] == [2, 4, 6, 7]
        assert sys.modules["recording"].EVENTS[-2:] == [("end", 7), ("close",)]
        before = (run / "metrics.jsonl").read_bytes()
        assert gregale("train", *given, *stopping) == 0
        assert f"early is complete: a callback ended it after step 7 of 12: {why}" in capsys.readouterr().out
        assert (run / "metrics.jsonl").read_bytes() == before
        (found,) = json.loads(printed("runs", "runs/early", "--json"))
        assert (found["state"], found["step"]) == ("complete", 7)
        assert found["stop_reason"].startswith(why)
        assert f"early: a callback ended it: {why}" in " ".join(printed("runs", "runs/early").split())
        assert gregale("report", "early", "--output", "early.html") == 0
        assert f"A callback ended early: {why}" in (inputs / "early.html").read_text()
        assert gregale("train", *given, "--callbacks", "[]") == 0
        assert checkpoint_steps(run)[-1] == 12
        assert "callback" not in capsys.readouterr().out.partition("step 12/12")[2]
        assert json.loads(printed("runs", "runs/early", "--json"))[0]["stop_reason"] is None


def test_a_callback_that_fails_after_a_checkpoint_ends_no_run(gregale, inputs, capsys):
    given = ["--callbacks", "[{type: failing}]", "--checkpoint.every=1", "--checkpoint.keep_last=1"]
    assert gregale("train", "tiny.yaml", "--name", "kept", *PLUGIN[:-1], *given) == 0
    assert capsys.readouterr().out.count("Failing.on_checkpoint raised ZeroDivisionError (") == 4
    assert checkpoint_steps(inputs / "runs" / "kept") == [4]


def test_a_signal_cuts_an_evaluation_which_the_next_start_makes_again(gregale, inputs, recorded, capsys, monkeypatch):
    """The state is saved first; of the cut evaluation and of what follows it nothing is logged."""
    between, seen, cut = Evaluation._between, [], inputs / "runs" / "cut"

    def train(signal_at: int | None = None) -> int:
        def signalled(evaluation):
            if evaluation._steps.step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            between(evaluation)

        monkeypatch.setattr(Evaluation, "_between", signalled)
        code = gregale("train", "tiny.yaml", "--name", "cut", *RECORDER)
        seen.extend(sys.modules["recording"].EVENTS)
        return code

    for step in (2, 4):  # in the middle, and at the end
        assert train(signal_at=step) == 143
        *_, saved, stopped = capsys.readouterr().out.splitlines()
        assert saved == f"The checkpoint of step {step} is saved."
        assert stopped == f"Stopped by SIGTERM after step {step} and saved; the same command goes on from there."
        assert [line["step"] for line in lines(cut) if "eval_loss" in line] == [2][: step // 4]
    assert train() == 0
    undisturbed, events = recorded["psdp"]
    found, expected = ([each for each in of if each[0] in ("evaluation", "after")] for of in (seen, events))
    assert found == expected
    metrics = ("step", "loss", "eval_loss", "own_after")
    found, expected = ([[line.get(name) for name in metrics] for line in lines(run)] for run in (cut, undisturbed))
    assert found == expected
    assert_same_state(cut, undisturbed, 4)


def test_a_callback_that_a_signal_left_out_of_the_last_step_is_called_by_the_next_start(gregale, capsys, monkeypatch):
    """Once, and without an evaluation, which would be missing too."""
    recording, called = import_module("recording"), []
    signals = [signal.SIGTERM, 0, 0]

    def waits_after(callback, step):
        if step == 4:
            os.kill(os.getpid(), signals.pop(0))
        return step == 4

    monkeypatch.setattr(recording.Recorder, "waits_after", waits_after)
    codes = []
    for _ in range(3):
        codes.append(
            gregale("train", "tiny.yaml", "--name", "left", *RECORDER, "--evaluation.every=null", "--data.held_out=0")
        )
        called.append([event[:2] for event in recording.EVENTS if event[0] == "after"])
        recording.EVENTS.clear()
    assert (codes, called) == ([143, 0, 0], [[], [("after", 4)], []])
    assert "left is complete: it has done 4 steps" in capsys.readouterr().out
