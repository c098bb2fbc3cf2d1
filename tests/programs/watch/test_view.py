"""What is seen of a run: on terminals of any size and encoding, of runs in any state."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gregale.programs.watch import (
    BARS,
    DROP_ORDER,
    GAP,
    RunPoller,
    RunStatus,
    fleet_view,
    plain_line,
    sparkline,
    view_of,
)
from gregale.runs.history import RunPaths
from gregale.runs.run_lock import hold_run_lock
from tests.runs.runs import step_line, write_lines, write_run


class Encoded(io.StringIO):
    def __init__(self, encoding: str):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding


def seen(view, width: int = 100, height: int = 40, encoding: str = "utf-8", made=view_of) -> list[str]:
    file = Encoded(encoding)
    console = Console(file=file, width=width, height=height)
    console.print(made(view, console))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def running(tmp_path) -> RunStatus:
    run = write_run(tmp_path / "a", 0, steps=200)
    full = {"mfu": 0.41, "evaluation_seconds": 5.0, "saving_seconds": 0.0, "host_memory_bytes": 2_000_000_000}
    write_lines(run, *(step_line(step, **full, replica_bytes=10**6) for step in range(1, 101)))
    write_lines(run, {"step": 100, "eval_loss": 2.5, "eval_loss.news": 2.75, "bits_per_byte": 1.25})
    with hold_run_lock(run):
        return RunPoller(RunPaths(run)).poll()[0]


def test_a_run_has_its_curves_and_where_its_time_goes(running):
    lines = seen(running)
    assert lines[0] == "a  running  step 100 of 200 (50%)  ETA 50s"
    loss, evaluation, mfu = (
        next(line for line in lines if line.startswith(name)).removeprefix(name).split()
        for name in ("loss ", "eval loss.news", "mfu")
    )
    assert (loss[0][0], loss[0][-1], len(loss[0]), loss[1]) == ("█", "▁", 60, "3.0000")
    assert (evaluation[-1], mfu[-1]) == ("2.7500", "41.0%")
    assert "50s since it was started: steps 80%, data 10%, evaluation 10%, saving 0%" in lines
    assert "memory: host 2.0 GB, sent over the slow link 1.0 MB" in lines
    assert "8 cpu (replica 2), psdp" in lines


def test_no_line_is_wider_than_the_terminal_and_a_low_one_has_the_first_curves(running):
    for width in (20, 40, 80, 300):
        assert max(map(len, seen(running, width))) <= width
    lines = seen(running, height=12)
    assert len(lines) <= 12
    assert any(line.startswith("loss") for line in lines)


def test_a_terminal_without_bars_has_other_signs(running):
    assert "".join(seen(running, encoding="ascii")).replace("━", "").isascii()


def test_a_run_that_stands_still_is_told(running):
    assert "nothing new" not in seen(replace(running, silent_seconds=29.0))[0]
    assert seen(replace(running, silent_seconds=300.0))[0].endswith("nothing new for 5m 00s")


def test_a_run_before_its_first_step(tmp_path):
    with hold_run_lock(write_run(tmp_path / "a", 0)):
        snapshot = RunPoller(RunPaths(tmp_path / "a")).poll()[0]
    assert seen(snapshot)[0] == "a  running  no step yet: preparing data or compiling"
    assert plain_line(snapshot) == "a running  no step yet: preparing data or compiling"


def test_damage_and_nans_are_told(tmp_path):
    run = write_run(tmp_path / "a", 2)
    write_lines(run, step_line(3, loss=None, learning_rate=float("nan")))
    (run / "metrics.jsonl").open("a").write("{]\n")
    text = "\n".join(seen(RunPoller(RunPaths(run)).poll()[0], 300))
    assert "a  damaged  step 3 of 10 (30%)" in text
    assert "1 of 4 lines are damaged, the first is line 4" in text


@pytest.fixture
def islands(tmp_path) -> list[RunStatus]:
    snapshots = []
    for name, steps in (("fleet-a", 30), ("fleet-b", 50)):
        run = write_run(tmp_path / name, 0, steps=60)
        fleet = {"round": 4, "members": 2, "waiting_seconds": 3.0}
        write_lines(run, *(step_line(step, **fleet) for step in range(1, steps + 1)))
        snapshots.append(RunPoller(RunPaths(run)).poll()[0])
    return snapshots


def test_islands_are_side_by_side(islands):
    lines = [line for line in seen(islands, 140, made=fleet_view) if "fleet" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in cells] == ["fleet-a", "fleet-b"]
    assert [row[1:4] for row in cells] == [["stopped", "30/60", "3.7000"], ["stopped", "50/60", "3.5000"]]
    assert [row[-4:] for row in cells] == [["512 tokens/s", "4", "2", "3s"]] * 2


@pytest.mark.parametrize(("width", "gone"), [(98, 0), (80, 2), (50, 4)])
def test_islands_on_a_narrow_terminal_lose_columns_and_no_letters(islands, width, gone):
    lines = seen(islands, width, made=fleet_view)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    wanted = ["island", "state", "step", "loss", "tokens/s", "round", "members", "waited"]
    wanted = [each for each in wanted if each not in DROP_ORDER[:gone]]
    assert lines[1].replace("┃", " ").split() == wanted


def test_a_plain_line(running):
    assert plain_line(running) == (
        "a running  step 100 of 200 (50%)  ETA 50s  loss 3.0000  eval loss 2.5000  512 tokens/s  MFU 41.0%"
    )


def test_that_an_island_waits_for_others_is_seen_while_it_runs(tmp_path):
    run = write_run(tmp_path / "a", 0, steps=200)
    follower, line = RunPoller(RunPaths(run)), "No round for 40 s: 1 of at least 2 islands are here (a)."
    with hold_run_lock(run):
        write_lines(run, step_line(1))
        follower.poll()
        RunPaths(run).stalled.write_text(line)
        now, events = follower.poll()
        assert events == [f"a: {line}"]
        assert line in plain_line(now)
        assert line in seen(now)
        assert f"a: {line}" in seen([now, now], made=fleet_view)
        RunPaths(run).stalled.write_text("")
        assert follower.poll()[1] == ["a: Rounds go on."]
        RunPaths(run).stalled.write_text(line)
    assert not follower.poll()[0].stalled  # it has ended


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        (range(8), 8, BARS),
        (range(80), 8, BARS),
        ([1, 1, 9, 9], 2, "▁█"),
        ([5.0], 60, "▁"),
        ([0, NAN, 1, INFINITY], 2, "▁█"),
        ([NAN, NAN], 2, "  "),
        ([], 10, ""),
    ],
)
def test_a_line(values, width, line):
    assert sparkline(np.array(values, float), width) == line


def test_a_loss_has_a_shape_after_its_first_steps():
    losses = np.array([100.0, *np.linspace(4, 2, 39)])
    assert len(set(sparkline(losses, 40))) == len(BARS)


@given(st.lists(st.floats(width=32)), st.integers(1, 40))
def test_whatever_the_values_each_has_a_bar_or_a_gap(values, width):
    line = sparkline(np.array(values, float), width)
    assert len(line) == min(len(values), width)
    assert set(line) <= {*BARS, GAP}
