"""A run's directory: reading, comparing, setting aside; files are whole or not there."""

import json
from dataclasses import replace

import pytest

from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.config_diff import changes
from gregale.runs.run_directory import RunDirectory
from gregale.storage.jsonl_reader import read_entries

CONFIG = TrainConfig("a", 10)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "a")
    run.write_config(CONFIG)
    return run


def test_what_is_written_is_read(run):
    assert run.read_config() == CONFIG
    run.write_config(replace(CONFIG, steps=20))
    assert run.read_config().steps == 20
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"], "no temporary file is left"


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a run directory: it has no config.yaml"):
        RunDirectory(tmp_path / "nowhere").read_config()
    RunDirectory(tmp_path / "nowhere").check_compatible(CONFIG)
    assert RunDirectory(tmp_path / "nowhere").archive() is None


def test_a_run_goes_on_with_what_may_change_only(run):
    run.check_compatible(replace(CONFIG, steps=20, log_every=5))
    with pytest.raises(UserError) as caught:
        run.check_compatible(replace(CONFIG, steps=20, seed=7))
    assert "configuration: seed 0 -> 7 (it orders the data" in str(caught.value)
    assert "steps 10" not in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_changes_are_noted_line_by_line(run):
    run.record_changes(4, [])
    assert not run.changes.exists()
    run.record_changes(4, changes(CONFIG, replace(CONFIG, steps=20)))
    run.record_changes(8, changes(CONFIG, replace(CONFIG, log_every=2, max_skipped=3)))
    noted = [json.loads(line) for line in run.changes.read_text().splitlines()]
    assert [line["step"] for line in noted] == [4, 8]
    assert noted[0]["changes"] == {"steps": [CONFIG.steps, 20]}
    assert noted[1]["changes"] == {"log_every": [1, 2], "max_skipped": [10, 3]}
    assert all({"time", "gregale"} < set(line) for line in noted)


def test_runs_are_set_aside_one_beside_the_other(run):
    for number in (1, 2, 3):
        (run.path / "mark").write_text(str(number))
        assert run.archive() == run.path.with_name(f"a.old-{number}")
        assert not run.path.exists()
        run.write_config(CONFIG)
    assert [(run.path.with_name(f"a.old-{number}") / "mark").read_text() for number in (1, 2, 3)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, False),
        ("", False),
        ('{"step": 8, "loss": 1.0}\n', False),
        ('{"step": 4, "eval_loss": 1.0}\n{"step": 8, "loss": 1.0}\n', False),
        ('{"step": 8, "loss": 1.0}\n{"step": 8, "eval_loss": null, "bits_per_byte": null}\n', False),
        ('{"step": 8, "loss": 1.0}\n{"step": 8, "eval_loss": 1.0, "bits', False),
        ('{"step": 8, "eval_loss": 1.0}\n{"step": 9, "lo', True),
        ('{"step": 8, "eval_loss": null, "acc.sums": 0.5}\n', False),
        ('{"step": 8, "acc.sums": 0.5}\n', True),
        ('{"step": 8, "acc.sums": null}\n', False),
        ('{"step": 8, "eval_loss": 1.0}\n{"step: 9}\n[{}]\n{}\n', True),
    ],
)
def test_whether_a_step_was_evaluated(run, text, expected):
    if text is not None:
        run.metrics.write_text(text)
    assert run.has_evaluation(8) is expected


def test_damaged_figures_are_left_out_and_told(run):
    run.metrics.write_bytes(b'{"step": 7}\n{"step": \xff}\n{"step": 8, "eval_loss": 1.0}\n"8"\n')
    assert run.has_evaluation(8)
    assert run.figures().problem == (
        f"{run.metrics}: 2 of 4 lines are damaged, the first is line 2; they are left out."
    )
    run.note_checkpoint(8)
    with pytest.raises(UserError, match="the metrics and samples of its 8 steps"):
        run.check_checkpoints([])


def test_a_line_is_whole_behind_one_that_lost_its_end(run):
    run.changes.write_text('{"step": 1}')
    run.record_changes(4, changes(CONFIG, replace(CONFIG, steps=20)))
    assert [entry["step"] for entry in read_entries(run.changes).entries] == [1, 4]


def test_samples_of_a_step_replace_those_of_this_and_later_steps(run):
    def written() -> str:
        return run.samples.read_bytes().decode()

    run.write_samples(4, [])
    assert not run.samples.exists()
    run.write_samples(4, ["a\r\n", "b"])
    run.write_samples(8, ["c\n--- step\n"])
    whole = "--- step 4\na\r\n\n--- step 4\nb\n--- step 8\nc\n--- step\n\n"
    assert written() == whole
    run.write_samples(9, [])
    assert written() == whole
    run.write_samples(8, ["d"])
    assert written() == whole.partition("--- step 8")[0] + "--- step 8\nd\n"
    run.write_samples(5, [])
    assert written() == whole.partition("--- step 8")[0]
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "samples.txt"]


def test_missing_checkpoints_are_told_from_none_yet(run):
    assert run.check_checkpoints([]) is None, "a run that was killed before its first checkpoint begins anew"
    run.metrics.write_text('{"step": 7, "loss": 1.0}\n')
    assert run.check_checkpoints([]) is None
    run.note_checkpoint(4)
    assert run.check_checkpoints([2, 4]) is None
    assert run.check_checkpoints([4, 6]) is None, "a process was killed between the checkpoint and its note"
    assert run.check_checkpoints([6]) is None
    with pytest.raises(UserError, match=r"no checkpoint any more, .* one at step 4\. .* of its 7 steps\. .*--fresh"):
        run.check_checkpoints([])
    assert run.check_checkpoints([1, 2]) == (
        "The newest checkpoint, of step 4, is gone: going on from that of step 2 repeats 2 steps."
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": null}'])
def test_a_note_that_cannot_be_read_says_nothing(run, text):
    run.newest_checkpoint.write_text(text)
    assert run.recorded_checkpoint() is None
