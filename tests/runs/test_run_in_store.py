"""A run's directory in a store: its files are objects, whole or not there."""

import json
import os
import time

import pytest

from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.storage import RetryPolicy, files_below, storage_path
from gregale.storage import jsonl_writer as lines_module
from gregale.tracking.tracker import JsonlTracker, RunInfo
from tests.stores import Fault, proxied

CONFIG = TrainConfig("a", 10)


@pytest.fixture(params=["s3", "gs"])
def store(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def run(store) -> RunDirectory:
    run = RunDirectory(store / "a")
    run.write_config(CONFIG)
    return run


def lines(tracked) -> list[dict]:
    return [json.loads(line) for line in tracked.read_bytes().splitlines()]


def test_what_is_written_is_read(run, store):
    assert run.read_config() == CONFIG
    run.record_start(3, {"devices": 2})
    run.record_start(6, {"devices": 4})
    assert [line["devices"] for line in lines(run.starts)] == [2, 4]
    run.write_samples(4, ["a"])
    run.write_samples(8, ["b"])
    run.write_samples(5, [])
    assert run.samples.read_bytes() == b"--- step 4\na\n"
    assert run.recorded_checkpoint() is None
    run.note_checkpoint(4)
    assert run.recorded_checkpoint() == 4
    assert "There is no checkpoint yet" in run.resume_hint()
    with pytest.raises(UserError, match=f"{store}/b is not a run directory"):
        RunDirectory(store / "b").read_config()


def test_a_run_is_set_aside_with_all_it_has(run, store):
    for name in ("checkpoints/step-00000004/manifest.json", "checkpoints/step-00000004/x/0", "samples.txt", "lock"):
        (run.path / name).write_bytes(name.encode())
    before = {name: (run.path / name).read_bytes() for name in files_below(run.path) if name != "lock"}
    assert run.archive() == store / "a.old-1"
    assert {name: (store / "a.old-1" / name).read_bytes() for name in files_below(store / "a.old-1")} == before
    assert list(files_below(run.path)) == ["lock"], "which is held"
    run.write_config(CONFIG)
    assert run.archive() == store / "a.old-2"


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


def test_lines_are_written_before_a_checkpoint_counts_and_at_the_end(s3):
    tracker = JsonlTracker(s3 / "metrics.jsonl")
    tracker.log(1, {"loss": 2.0})
    assert not (s3 / "metrics.jsonl").exists(), "not with every line"
    tracker.flush()
    assert lines(s3 / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    for step in (2, 3):
        tracker.log(step, {"loss": float("nan")})
    tracker.close()
    assert lines(s3 / "metrics.jsonl")[1:] == [{"step": step, "loss": None} for step in (2, 3)]
    resumed = JsonlTracker(s3 / "metrics.jsonl", resumed_from=2)
    resumed.log(3, {"loss": 1.0})
    resumed.close()
    assert [(line["step"], line["loss"]) for line in lines(s3 / "metrics.jsonl")] == [(1, 2.0), (2, None), (3, 1.0)]


def test_lines_of_later_steps_go_even_if_none_comes_instead(s3):
    (s3 / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n')
    JsonlTracker(s3 / "metrics.jsonl", resumed_from=1).close()
    assert lines(s3 / "metrics.jsonl") == [{"step": 1}]


def test_lines_are_written_after_a_while_and_kept_while_the_store_is_away(s3, s3_endpoint, monkeypatch):
    monkeypatch.setattr(lines_module, "FLUSH_SECONDS", 0.05)
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        reports: list[str] = []
        to = storage_path(str(s3 / "metrics.jsonl"), RetryPolicy(seconds=0.1, first_delay_seconds=0.05))
        tracker = JsonlTracker(to, report=reports.append)
        proxy.faults[:] = [Fault(500, 4, "PUT")]
        tracker.log(1, {"loss": 2.0})
        until = time.monotonic() + 30
        while len(reports) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert "Its lines are kept until it can be written." in reports[0]
        assert reports[1] == f"{to} is written again, with the lines that were kept."
        assert lines(to) == [{"step": 1, "loss": 2.0}]
        proxy.faults[:] = [Fault("denied", 1000, "PUT")]
        tracker.log(2, {"loss": 2.0})
        with pytest.raises(UserError, match=r"metrics.jsonl lacks its last 1 lines\. .*the store refused access"):
            tracker.close()


def test_other_trackers_of_a_run_in_a_store_have_a_folder_here(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunInfo(s3 / "a", "a", {}).files.absolute() == tmp_path / "trackers" / "a"
    assert os.listdir("trackers") == ["a"]
    assert RunInfo(tmp_path / "a", "a", {}).files == tmp_path / "a"
