"""What happens to a run when something goes wrong: nothing that was written is lost, and the user is told."""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

from gregale.errors import UserError
from gregale.runs.run_lock import hold_run_lock
from tests.disk import largest_file
from tests.programs.tiny import again, checkpoint_steps, content, lines, losses

# Numbers


DILOCO = [  # the first outer step comes after the first checkpoint, in which replicas have not parted yet
    *["--sync.type", "diloco", "--sync.warmup_steps", "4", "--sync.period", "6", "--sync.outer.learning_rate", "3e38"],
    *["--optimizer.schedule.warmup", "1", "--optimizer.learning_rate", "5"],
]


def test_diloco_keeps_the_checkpoint_before_an_outer_step_that_overflows(refusal, inputs):
    run = inputs / "runs" / "outer"
    error = refusal("train", "tiny.yaml", "--name", "outer", *DILOCO)
    assert "After step 8, " in error
    assert "arrays of the state hold NaN or infinity (method/" in error
    assert "The newest one is that of step 4." in error
    assert checkpoint_steps(run) == [4]
    assert [step for step, _ in losses(run)] == list(range(1, 9))
    # Without a save in between the skipped steps end the run, and the message says that they are not to blame.
    rarely = ["--checkpoint.every", "50", "--max_skipped", "2"]
    error = refusal("train", "tiny.yaml", "--name", "outer", *DILOCO, *rarely)
    assert "not finite in the last 2 steps (step 8" in error
    assert "An update before them made" in error
    assert "infinite or NaN" in error
    assert checkpoint_steps(run) == [4]


def test_a_held_out_loss_that_is_no_number_is_not_done(copied, refusal, monkeypatch):
    """A run whose last evaluation was lost makes up for it."""
    *kept, _ = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(kept))
    monkeypatch.setattr(
        "gregale.programs.runtime.evaluation.Evaluator.__call__", lambda *_: {"eval_loss": float("nan")}
    )
    assert "has done its 12 steps, but its held-out loss is nan" in refusal(*again(copied))


# Two at once


def test_processes_compare_their_text_before_a_run_begins(refusal, inputs, monkeypatch):
    differs = Mock(side_effect=UserError("data is another in process 1"))
    monkeypatch.setattr("gregale.programs.train.stages.agree_on_text", differs)
    assert "data is another in process 1" in refusal("train", "tiny.yaml", "--name", "never")
    assert not (inputs / "runs" / "never").exists()


def test_a_run_that_is_being_trained_is_left_alone_and_can_be_evaluated(copied, gregale, refusal, capsys):
    before = content(copied)
    with hold_run_lock(copied):
        for fresh in ([], ["--fresh"]):
            error = refusal(*again(copied), "--steps", "16", *fresh, code=os.EX_TEMPFAIL)
            assert f"is being trained by process {os.getpid()} on " in error
            assert content(copied).keys() - before.keys() == {Path("lock")}
        assert gregale("eval", copied) == 0
    assert "at step 12: held-out loss" in capsys.readouterr().out
    assert content(copied) == before
    assert [path.name for path in copied.parent.iterdir()] == ["whole"]


# Checkpoints that are gone


def test_a_run_without_its_checkpoints_is_not_begun_anew(copied, refusal):
    shutil.rmtree(copied / "checkpoints")
    before = content(copied)
    error = refusal(*again(copied), "--steps", "16")
    assert "has no checkpoint any more, but this run has saved one at step 12" in error
    assert "would delete the metrics and samples of its 12 steps" in error
    assert "--fresh" in error
    assert content(copied) == before


# Disks


def test_a_run_goes_on_though_no_checkpoint_can_be_saved_and_then_begins_anew(
    gregale, tmp_path, whole, capsys, monkeypatch
):
    """No file may grow beyond a size that arrays have and figures have not, as if the disk were full.

    The next run of that name begins at step 1, as after an end before the first checkpoint, and outlives its reader.
    """
    run = tmp_path / "runs" / "whole"
    with largest_file(16_000):
        assert gregale(*again(run)) == 2
    captured = capsys.readouterr()
    for step in (4, 8, 12):
        assert f"The checkpoint of step {step} could not be saved: File too large" in captured.out
    assert "eval loss" in captured.out
    assert "Done." not in captured.out
    assert captured.err.count("\n") == 1, captured.err
    assert "ended after step 12 of 12, but its last checkpoint could not be saved: File too large" in captured.err
    assert losses(run) == losses(whole)
    assert list((run / "checkpoints").iterdir()) == []

    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", os.fdopen(writing, "w"))
        assert gregale(*again(run)) == 0
        sys.stdout.close()
    assert losses(run) == losses(whole)
    assert [line["step"] for line in lines(run) if "eval_loss" in line] == [6, 12]
    assert json.loads((run / "newest_checkpoint.json").read_text()) == {"step": 12}


def test_a_file_in_the_way_is_one_paragraph(copied, refusal, tmp_path):
    checkpoints = checkpoint_steps(copied)
    (copied / "metrics.jsonl").unlink()
    (copied / "metrics.jsonl").mkdir()
    assert "metrics.jsonl" in refusal(*again(copied))
    assert checkpoint_steps(copied) == checkpoints
    (tmp_path / "file").write_text("a file in place of the folder of runs")
    assert str(tmp_path / "file") in refusal("train", "tiny.yaml", "--runs", tmp_path / "file")
