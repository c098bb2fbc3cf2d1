"""A run's directory: reading, comparing, setting aside; files and objects are whole or not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gregale.checkpoint.manifest import MANIFEST, METADATA, folder_name
from gregale.errors import UserError
from gregale.methods.config import OUTER, DilocoConfig
from gregale.model.llama import LlamaConfig
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.storage import RetryPolicy, StoragePath, files_below, storage_path
from gregale.storage.jsonl import read_entries
from tests.stores import Fault, proxied

CONFIG = TrainConfig("a", 10)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "a")
    run.write_config(CONFIG)
    return run


@pytest.fixture(params=["disk", "s3", "gs"])
def place(request, tmp_path) -> StoragePath:
    return tmp_path if request.param == "disk" else request.getfixturevalue(request.param)


def test_a_run_from_before_momentum_had_a_warm_up_has_none(run):
    run.write_config(replace(CONFIG, sync=DilocoConfig()))
    assert run.read_config().sync == DilocoConfig()
    text = run.config.read_text()
    assert text.count("    momentum_warmup: 10\n") == 1
    run.config.write_text(text.replace("    momentum_warmup: 10\n", ""))
    assert run.read_config().sync == DilocoConfig(outer=replace(OUTER, momentum_warmup=0))


def test_what_is_written_is_read(place):
    run = RunDirectory(place / "a")
    with pytest.raises(UserError, match=f"{place}/a is not a run directory: it has no config.yaml"):
        run.read_config()
    run.check_compatible(CONFIG)
    assert run.archive() is None
    for steps in (10, 20):
        run.write_config(replace(CONFIG, steps=steps))
        assert run.read_config().steps == steps
    assert list(files_below(run.path)) == ["config.yaml"], "no temporary file is left"
    for devices in (2, 4):
        run.record_start(3, {"devices": devices})
    assert [line["devices"] for line in read_entries(run.starts).entries] == [2, 4]
    for step, texts in ((4, ["a"]), (8, ["b"]), (5, [])):
        run.write_samples(step, texts)
    assert run.samples.read_bytes() == b"--- step 4\na\n"
    assert run.saved().step is None
    run.note_checkpoint(4)
    assert run.saved().step == 4
    assert "There is no checkpoint yet" in run.resume_hint()


def test_a_run_that_has_saved_nothing_takes_any_configuration(run):
    run.checkpoints.mkdir()
    assert run.saved_config() is None
    run.check_compatible(replace(CONFIG, model=LlamaConfig(layers=2)))
    folder = run.checkpoints / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    assert run.saved_config() == CONFIG
    with pytest.raises(UserError, match=r"model\.layers 12 -> 2"):
        run.check_compatible(replace(CONFIG, model=LlamaConfig(layers=2)))


def test_a_run_goes_on_with_what_may_change_only(run):
    run.note_checkpoint(8)
    run.check_compatible(replace(CONFIG, steps=20, log_every=5))
    with pytest.raises(UserError) as caught:
        run.check_compatible(replace(CONFIG, steps=20, seed=7, model=LlamaConfig(layers=2)))
    assert "configuration: seed 0 -> 7 (it orders the data" in str(caught.value)
    assert "; model.layers 12 -> 2 (the saved parameters have this shape)" in str(caught.value)
    assert "steps 10" not in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_the_stage_of_an_islands_checkpoint_is_that_of_its_fleet(run):
    """An island that is slower than others has made fewer steps than the fleet when a stage begins."""
    later = TrainConfig("a", steps=10, stages=[{"from": 8, "batch": {"sequence_length": 9}}])
    run.write_config(later)
    run.note_checkpoint(3)
    part = run.checkpoints / folder_name(3) / "part"
    part.mkdir(parents=True)
    (part.parent / MANIFEST).write_text(json.dumps({"files": {f"part/{METADATA}": ""}}))
    for stage, length in ((0, 1024), (1, 9)):
        (part / METADATA).write_text(json.dumps({"islands": {"stage": stage}}))
        assert run.config_at().batch.sequence_length == length
        run.check_compatible(replace(later, log_every=5))


def test_changes_are_noted_line_by_line(run):
    run.record_changes(4, [])
    assert not run.changes.exists()
    run.record_changes(4, changes(CONFIG, replace(CONFIG, steps=20)))
    run.record_changes(8, changes(CONFIG, replace(CONFIG, log_every=2, max_skipped=3)))
    run.changes.write_bytes(run.changes.read_bytes().removesuffix(b"\n"))  # as an editor may
    run.record_changes(9, changes(CONFIG, replace(CONFIG, steps=20)))
    noted = read_entries(run.changes).entries
    assert [line["step"] for line in noted] == [4, 8, 9]
    assert noted[0]["changes"] == {"steps": [CONFIG.steps, 20]}
    assert noted[1]["changes"] == {"log_every": [1, 2], "max_skipped": [10, 3]}
    assert all({"time", "gregale"} < set(line) for line in noted)


def test_a_run_is_set_aside_with_all_it_has(place):
    run = RunDirectory(place / "a")
    run.write_config(CONFIG)
    (run.path / "checkpoints" / "step-00000004" / "x").mkdir(parents=True)
    for name in ("checkpoints/step-00000004/manifest.json", "checkpoints/step-00000004/x/0", "samples.txt", "lock"):
        (run.path / name).write_bytes(name.encode())
    before = {name: (run.path / name).read_bytes() for name in files_below(run.path) if name != "lock"}
    assert run.archive() == place / "a.old-1"
    assert {name: (place / "a.old-1" / name).read_bytes() for name in files_below(place / "a.old-1")} == before
    assert list(files_below(run.path)) == ["lock"] * (not isinstance(place, Path)), "which is held"
    run.write_config(CONFIG)
    assert run.archive() == place / "a.old-2"


def test_setting_aside_that_fails_leaves_the_run(s3, s3_endpoint, monkeypatch):
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        run = RunDirectory(storage_path(str(s3 / "a"), RetryPolicy(seconds=0.2, first_delay_seconds=0.05)))
        run.write_config(CONFIG)
        (run.path / "samples.txt").write_bytes(b"text")
        proxy.faults[:] = [Fault(503, 1000, "PUT", "a.old-1/samples.txt")]
        with pytest.raises(UserError, match="the store did not answer as it should"):
            run.archive()
        assert list(files_below(run.path)) == ["config.yaml", "samples.txt"]
        proxy.faults.clear()
        assert run.archive() == s3 / "a.old-2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ('{"step": 4, "eval_loss": 1.0}\n{"step": 8, "loss": 1.0}\n', False),
        ('{"step": 8, "loss": 1.0}\n{"step": 8, "eval_loss": null, "bits_per_byte": null}\n', False),
        ('{"step": 8, "loss": 1.0}\n{"step": 8, "eval_loss": 1.0, "bits', False),
        ('{"step": 8, "eval_loss": 1.0}\n{"step": 9, "lo', True),
        ('{"step": 8, "eval_loss": null, "acc.sums": 0.5}\n', False),
        ('{"step": 8, "acc.sums": 0.5}\n', True),
        ('{"step": 8, "eval_loss": 1.0}\n{"step: 9}\n[{}]\n{}\n', True),
    ],
)
def test_whether_a_step_was_evaluated(run, text, expected):
    assert run.has_evaluation(8) is False
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
    for text in ("", "{", "[]", '{"step": null}'):
        run.newest_checkpoint.write_text(text)
        assert run.saved().step is None
    run.note_checkpoint(4)
    assert run.check_checkpoints([2, 4]) is None
    assert run.check_checkpoints([4, 6]) is None, "a process was killed between the checkpoint and its note"
    assert run.check_checkpoints([6]) is None
    with pytest.raises(UserError, match=r"no checkpoint any more, .* one at step 4\. .* of its 7 steps\. .*--fresh"):
        run.check_checkpoints([])
    assert run.check_checkpoints([1, 2]) == (
        "The newest checkpoint, of step 4, is gone: going on from that of step 2 repeats 2 steps."
    )
