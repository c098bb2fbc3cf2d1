"""Following a run that grows, is started again, and ends."""

import json

import numpy as np
import pytest

from gregale.programs.watch import RunPoller, RunStatus, devices, seconds_a_step
from gregale.runs.history import Column, Figures, RunPaths, State, Summary
from gregale.runs.run_lock import hold_run_lock
from tests.runs.runs import START, step_line, write_lines, write_run


def figures(**columns: list[float]) -> Figures:
    return Figures({name: Column(np.arange(1, 1 + len(x)), np.array(x, float)) for name, x in columns.items()})


def test_a_run_is_followed_through_a_stop_and_another_start(tmp_path):
    now = 100.0
    run = write_run(tmp_path / "a", 3)
    follower = RunPoller(RunPaths(run), clock=lambda: now)
    with hold_run_lock(run):
        snapshot, events = follower.poll()
        assert (snapshot.summary.state, snapshot.summary.step, events) == (State.RUNNING, 3, [])
        assert (snapshot.silent_seconds, snapshot.remaining_seconds) == (None, 7 * 0.5)
        write_lines(
            run, step_line(4), {"step": 4, "eval_loss": 2.5, "acc.sums": 0.75, "acc_stderr.sums": 0.1}, step_line(5)
        )
        snapshot, events = follower.poll()
        assert (snapshot.last("loss"), snapshot.silent_seconds) == (3.95, 0.0)
        assert events == ["a step 4: eval loss 2.5000, acc.sums 75.0%"]
        now += 8
        assert follower.poll()[0].silent_seconds == 8.0
    snapshot, events = follower.poll()
    assert events == ["a has stopped, step 5 of 10; the command that started it resumes it."]
    assert snapshot.remaining_seconds is None
    # It goes on from a checkpoint of step 4: the later lines are dropped, as the tracker does it.
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (run / "metrics.new").write_text("".join(kept))
    (run / "metrics.new").rename(run / "metrics.jsonl")
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({**START, "step": 4, "devices": 4}) + "\n")
    with hold_run_lock(run):
        snapshot, events = follower.poll()
        assert events == ["a goes on after step 4, on 4 cpu (replica 2).", "a is running, step 4 of 10."]
        assert snapshot.figures["loss"].steps.tolist() == [1, 2, 3, 4]


def test_speed_is_of_the_newest_start_with_its_pauses():
    assert seconds_a_step(figures(elapsed_seconds=[1, 2, 9, 1, 5, 9], step_seconds=[1.0] * 6)) == 4.0
    assert seconds_a_step(figures(elapsed_seconds=[1, 2, 0.5], step_seconds=[1.0, 1.0, 3.0])) == 3.0
    assert seconds_a_step(figures(loss=[1.0], step_seconds=[0.0])) is None
    assert seconds_a_step(figures(elapsed_seconds=[1, 2, float("nan")], step_seconds=[3.0] * 3)) == 3.0
    assert seconds_a_step(figures()) is None


def test_speed_is_that_since_an_island_took_over_the_count_of_a_peer():
    steps = np.array([10, 20, 30, 5000, 5010, 5020])
    elapsed = Column(steps, 0.5 * np.array([10, 20, 30, 40, 50, 60], float))
    assert seconds_a_step(Figures({"elapsed_seconds": elapsed})) == 0.5


def test_what_has_no_number_has_no_last_value():
    snapshot = RunStatus(Summary("a", "a", State.STOPPED), figures(loss=[1.0, float("nan")]))
    assert snapshot.last("loss") is snapshot.last("mfu") is None


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (START, "8 cpu (replica 2)"),
        ({"devices": 1, "device_kind": "cpu", "mesh": {"data": 1}}, "1 cpu"),
        ({"devices": 1, "device_kind": "cpu", "mesh": 3}, "1 cpu"),
        ({}, "devices that it did not name"),
    ],
)
def test_devices_in_words(start, said):
    assert devices(start) == said
