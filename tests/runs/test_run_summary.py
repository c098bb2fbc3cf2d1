"""How a run stands, by what it has left."""

import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gregale.atomic_files import LockHeld, acquire, is_held
from gregale.errors import UserError
from gregale.runs.history import RunPaths, State, last_entries, summaries, summary_of
from gregale.runs.run_lock import TIMEOUT_SECONDS, hold_run_lock, is_being_trained
from gregale.storage import ObjectPath
from gregale.storage.lease import LeaseRecord
from tests.runs.runs import step_line, write_lines, write_run


def state_of(run) -> State:
    return summary_of(RunPaths(run)).state


def written(path: Path, lease: LeaseRecord, age_seconds: float = 0.0) -> None:
    """A lease whose file nobody has locked."""
    path.write_bytes(lease.to_bytes())
    os.utime(path, (time.time() - age_seconds,) * 2)


def test_a_run_in_a_few_figures(tmp_path):
    run = write_run(tmp_path / "a", 10, saved=10, evaluated=True, reduce={"codec": "int4"})
    found = summary_of(RunPaths(run))
    assert (found.name, found.state, found.problem) == ("a", State.COMPLETE, None)
    assert (found.step, found.steps, found.saved) == (10, 10, 10)
    assert (found.loss, found.eval_loss, found.bits_per_byte) == (3.9, 3.5, 2.0)
    assert (found.method, found.tokens, found.bytes_sent) == ("psdp, int4", 2560, 10_000)
    assert found.began == "2026-11-22T10:00:00+00:00"
    write_lines(run, step_line(11, replica_bytes=10, network_bytes_sent=7))
    assert summary_of(RunPaths(run)).bytes_sent == 7, "an island's, over the network"


def test_figures_that_are_no_numbers_are_none(tmp_path):
    run = write_run(tmp_path / "a", 3)
    line = '{"step": 4, "loss": NaN, "tokens": "4", "mfu": -Infinity, "tokens_per_second": 1e999, "replica_bytes": 1'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{line}{"0" * 400}}}\n{{"step": 1{"0" * 400}, "loss": 1.0}}\n')
    found = summary_of(RunPaths(run))
    assert found.step == 4
    assert {found.loss, found.tokens, found.mfu, found.tokens_per_second, found.bytes_sent} == {None}
    assert "1 damaged lines" in str(found.problem)


NO_TEXT = {"held_out": 0, "validation": {}}


@pytest.mark.parametrize(
    ("left", "state"),
    [
        ({"done": 10, "saved": 10, "evaluated": True}, State.COMPLETE),
        ({"done": 10, "saved": 10, "evaluated": False}, State.STOPPED),  # before its evaluation was written
        ({"done": 10, "saved": 10, "evaluated": False, "data": NO_TEXT}, State.COMPLETE),
        ({"done": 10, "saved": 8, "evaluated": True}, State.STOPPED),
        ({"done": 0}, State.STOPPED),
    ],
)
def test_complete_or_stopped(tmp_path, left, state):
    assert state_of(write_run(tmp_path / "a", **left)) is state


def test_a_run_with_tasks_alone_is_complete_when_they_are_scored(tmp_path):
    tasks = {"every": None, "tasks": ["a.jsonl"]}
    run = write_run(tmp_path / "a", 10, saved=10, data=NO_TEXT, evaluation=tasks)
    assert state_of(run) is State.STOPPED
    write_lines(run, {"step": 10, "acc.a": 0.5, "acc_stderr.a": 0.1})
    assert state_of(run) is State.COMPLETE


@pytest.mark.parametrize(("done", "left"), [(10, {"evaluated": True}), (9, {"data": NO_TEXT})])
@pytest.mark.parametrize("steps", [9, 20])
def test_an_island_is_complete_with_its_fleet_whatever_its_own_steps(tmp_path, steps, done, left):
    """Whether its last step was logged (not each of them may be), and whether it was its turn to evaluate after it."""
    others = {"steps": steps, "evaluation": {"every": 5}, "islands": {"lighthouse": "a:1"}, **left}
    for name, metadata, state in (
        ("of an earlier version", {}, State.STOPPED),
        ("left", {"islands": {"complete": False}}, State.STOPPED),
        ("complete", {"islands": {"complete": True}}, State.COMPLETE),
    ):
        assert state_of(write_run(tmp_path / name, done, saved=10, metadata=metadata, **others)) is state, name
    others["data"] = {"held_out": 0.1}
    run = write_run(tmp_path / "not evaluated", 10, saved=10, metadata=metadata, **{**others, "evaluated": False})
    assert state_of(run) is State.STOPPED


@pytest.mark.parametrize(("age", "trained"), [(1.0, True), (2 * TIMEOUT_SECONDS, False)])
def test_of_another_host_the_touches_count(tmp_path, age, trained):
    written(tmp_path / "lock", replace(LeaseRecord.of_this_process(), host="elsewhere", machine="elsewhere"), age)
    assert is_being_trained(tmp_path) is trained
    written(tmp_path / "lock", replace(LeaseRecord.of_this_process(), pid=2**22 + 1), age)
    assert not is_being_trained(tmp_path)


def test_who_looks_whether_a_lock_is_held_keeps_nobody_from_it(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not path.exists()
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(LockHeld):
            acquire(path)
        monkeypatch.setattr("gregale.atomic_files.time.sleep", lambda _: looking.close())
        acquire(path).close()


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_in_a_store_who_counts_trains(store, request):
    folder: ObjectPath = request.getfixturevalue(store)
    assert not is_being_trained(folder)
    with hold_run_lock(folder):
        assert is_being_trained(folder)
    dead = replace(LeaseRecord.of_this_process(), pid=2**22 + 1)
    (folder / "lock").write_bytes(dead.to_bytes())
    assert not is_being_trained(folder), "a process of this machine that is gone"
    (folder / "lock").write_bytes(replace(dead, machine="elsewhere").to_bytes())
    assert is_being_trained(folder), "written a moment ago"


def test_runs_in_a_store(s3, tmp_path):
    run = write_run(tmp_path / "a", 10, saved=10, evaluated=True)
    for path in run.rglob("*"):
        if path.is_file():
            (s3 / path.relative_to(tmp_path).as_posix()).write_bytes(path.read_bytes())
    (found,) = summaries(s3)
    assert replace(found, path="") == replace(summary_of(RunPaths(run)), path="")


def broken(run: Path, how: str) -> None:
    newest = run / "checkpoints" / "step-00000004"
    match how:
        case "config":
            (run / "config.yaml").write_text("steps: [")
        case "cut":
            (newest / "arrays").write_bytes(b"abc")
        case "gone":
            shutil.rmtree(run / "checkpoints")
        case "manifest":
            (newest / "manifest.json").write_text("{")
        case "figures":
            write_lines(run, step_line(8))
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 9, "lo\n{"step": 10')


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("config", "config.yaml, line 1"),
        ("cut", "step-00000004: 1 files are gone or not whole, arrays among them"),
        ("gone", "has no checkpoint any more, but one of step 4 was saved"),
        ("manifest", "so the checkpoint of step 4 cannot"),
        ("figures", "metrics.jsonl has 1 damaged lines among the last 9"),
    ],
)
def test_damage_is_told(tmp_path, how, said):
    run = write_run(tmp_path / "a", 7, saved=4)
    broken(run, how)
    (found,) = summaries(tmp_path)
    assert found.state is State.DAMAGED
    assert said in str(found.problem)
    assert found.step == (8 if how == "figures" else 7)
    with hold_run_lock(run):
        assert state_of(run) is State.RUNNING, "its files may be another process's work in progress"


def test_only_as_much_of_the_metrics_is_read_as_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("gregale.runs.history._TAIL_BYTES", 1000)
    write_lines(tmp_path, {"step": 3, "eval_loss": 1.0}, *(step_line(step) for step in range(4, 200)))
    found = last_entries(tmp_path / "metrics.jsonl")
    assert (found.step["step"], found.evaluation["step"], found.damage) == (199, 3, None)
    assert last_entries(tmp_path / "none.jsonl") == ({}, {}, None)


def test_what_is_a_run(tmp_path):
    write_run(tmp_path / "a", 1)
    for name in ("fleet.islands", "notes", "begun", "left", "model/huggingface"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "fleet.islands" / "config.yaml").write_text("name: fleet")
    for name in ("a.txt", "left/lock", "model/huggingface/model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "model" / "config.yaml").write_text("steps: 1")
    with hold_run_lock(tmp_path / "begun"):
        found = {each.name: each.state for each in summaries(tmp_path)}
    assert found == {"a": State.STOPPED, "begun": State.RUNNING, "model": State.IMPORTED}
    assert [each.name for each in summaries(tmp_path / "a")] == ["a"]
    with pytest.raises(UserError, match="does not exist"):
        summaries(tmp_path / "none")
