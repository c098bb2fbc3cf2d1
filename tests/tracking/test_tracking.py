"""Figures arrive where they should, whole, once, and in words that fit."""

import io
import json
import re
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.storage.jsonl_reader import read_entries
from gregale.tracking.choices import TrackerConfig, check_installed, open_trackers
from gregale.tracking.console import Console
from gregale.tracking.metrics import METRICS
from gregale.tracking.rate import Rate
from gregale.tracking.tracker import Guarded, JsonlTracker, RunInfo, Trackers
from tests.disk import largest_file
from tests.test_terminal import Terminal

CONFIGS = {name: choice() for name, choice in TrackerConfig.get_known_choices().items()}
TRAINING = {"loss": 2.5, "grad_norm": 0.5, "tokens": 4096, "tokens_per_second": 12345.6, "step_seconds": 30.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entries(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_an_object_a_line_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, TRAINING)
    tracker.log(1, {"eval_loss": jnp.float32(1.5), "bits_per_byte": np.float32(2.25)})
    assert entries(tmp_path / "metrics.jsonl") == [
        {"step": 1, **TRAINING},
        {"step": 1, "eval_loss": 1.5, "bits_per_byte": 2.25},
    ]
    tracker.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, jnp.float32("nan")])
def test_what_is_no_number_is_null(tmp_path, value):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(3, {"loss": value, "tokens": 1})
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "loss": null, "tokens": 1}\n'


def test_resuming_drops_what_a_killed_run_wrote_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [1, 2, 2, 3, 4]
    damaged = "[" * 9999 + "\n" + "nothing\n"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + damaged + '{"step": 1, "lo')
    tracker = JsonlTracker(path, resumed_from=2)
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    assert entries(path) == [{"step": 1}, {"step": 2}, {"step": 2}, {"step": 3, "loss": 1.0}]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("room", [0, 5, 30])
def test_lines_wait_for_room_and_none_is_torn(tmp_path, room):
    """`room`: bytes that the disk still takes after the first line."""
    path, reports = tmp_path / "metrics.jsonl", []
    tracker = JsonlTracker(path, report=reports.append)
    tracker.log(1, {"loss": 1.0})
    whole = path.read_bytes()
    with largest_file(len(whole) + room):
        for step in range(2, 5):
            tracker.log(step, {"loss": 1.0})
            assert [entry["step"] for entry in entries(path)] == list(range(1, 2 + room // len(whole)))
    assert reports == [f"{path} cannot be written: File too large. Its lines are kept until there is room."]
    tracker.log(5, {"loss": 1.0})
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3, 4, 5]
    assert reports[1:] == [f"{path} is written again, with the lines that were kept."]
    with largest_file(0):
        tracker.log(6, {"loss": 1.0})
        with pytest.raises(UserError, match=r"metrics.jsonl lacks its last 1 lines: File too large\."):
            tracker.close()
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3, 4, 5]


def test_resuming_tells_once_of_damaged_lines_and_keeps_all_others(tmp_path):
    path, reports = tmp_path / "metrics.jsonl", []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": \xfe}\n{"step": 3, "note": "\xe2\x80\xa8"}\n{"step": 4, "lo')
    for _ in range(2):
        JsonlTracker(path, resumed_from=3, report=reports.append).close()
    assert reports == [f"{path}: 1 of 3 lines are damaged, the first is line 2; they are left out."]
    assert [entry["step"] for entry in read_entries(path).entries] == [1, 3]


def test_resuming_on_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = b"".join(b'{"step": %d}\n' % step for step in range(1, 6))
    path.write_bytes(content)
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        JsonlTracker(path, resumed_from=3)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@given(cut=st.integers(0, 60), resumed_from=st.integers(0, 6))
def test_wherever_the_file_was_cut_whole_lines_remain(tmp_path_factory, cut, resumed_from):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    content = b"".join(b'{"step": %d}\n' % step for step in range(1, 6))[:cut]
    path.write_bytes(content)
    JsonlTracker(path, resumed_from).close()
    whole = content.count(b"\n")
    assert [entry["step"] for entry in entries(path)] == list(range(1, min(whole, resumed_from) + 1))


def test_the_rate_is_of_the_window_and_leaves_out_the_first_step():
    rate = Rate(now=1000.0, step=50, window=4)
    assert (rate.tokens_per_second, rate.step_seconds) == (0.0, 0.0)
    rate.completed(51, tokens=100, now=1010.0)  # compilation
    assert (rate.tokens_per_second, rate.step_seconds) == (10.0, 10.0)
    rate.completed(52, tokens=100, now=1010.5)
    assert (rate.tokens_per_second, rate.step_seconds) == (200.0, 0.5)
    for step in range(53, 60):
        rate.completed(step, tokens=100, now=1010.5 + (step - 52) * 2.0)
    assert (rate.tokens_per_second, rate.step_seconds) == (50.0, 2.0)


def test_the_rate_takes_several_steps_at_once_and_no_time_at_all():
    rate = Rate(now=5.0)
    rate.completed(1, tokens=10, now=5.0)
    assert rate.tokens_per_second == 0.0
    rate.completed(5, tokens=40, now=7.0)
    assert (rate.tokens_per_second, rate.step_seconds) == (20.0, 0.5)


def test_plain_lines_come_at_intervals_with_the_first_and_the_last():
    file, clock = io.StringIO(), Clock()
    console = Console(file, fields=["replica_bytes"], interval_seconds=5.0, clock=clock)
    console.begin(100)
    for step in range(1, 101):
        clock.now += 0.125
        console.log(step, TRAINING | {"replica_bytes": 2_500_000})
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[:3] == [
        "step 0/100  compiling the first step",
        "step 1/100  loss 2.5000  30s, compiling included",
        "step 41/100  loss 2.5000  12,346 tokens/s  replica bytes 2.5 MB  ETA 29m 30s",
    ]
    assert [line.split("/")[0] for line in lines[1:]] == ["step 1", "step 41", "step 81", "step 100"]


def test_a_run_that_goes_on_compiles_too_and_one_that_is_done_does_not():
    file = io.StringIO()
    console = Console(file, interval_seconds=0)
    console.begin(9, done=4)
    console.log(5, TRAINING)
    console.log(6, TRAINING)
    console.begin(9, done=9)
    assert file.getvalue().splitlines() == [
        "step 4/9  compiling the first step",
        "step 5/9  loss 2.5000  30s, compiling included",
        "step 6/9  loss 2.5000  12,346 tokens/s  ETA 1m 30s",
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_progress_line_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    with Console(file, fields=["replica_bytes"]) as console:
        console.begin(1000)
        console.log(1, TRAINING)
        console.log(999, TRAINING | {"replica_bytes": 2_500_000, "step_seconds": 3000.0})
    drawn = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", file.getvalue())]
    assert max(map(len, drawn)) <= columns
    last = [line for line in drawn if "999/1000" in line][-1]
    assert "loss 2.5000" in last
    assert last.rstrip().endswith("ETA 50m 00s")
    assert ("replica bytes" in last) == (columns == 120)


def test_evaluations_and_messages_are_always_shown():
    file = io.StringIO()
    console = Console(file, clock=Clock())
    console.begin(9)
    for _ in range(2):
        console.log(4, {"eval_loss": 1.25, "bits_per_byte": 1.803})
        console.message("checkpoint [4] saved")
    shown = ["step 4/9  eval loss 1.2500  bits per byte 1.803", "checkpoint [4] saved"]
    assert file.getvalue().splitlines()[1:] == shown * 2


def test_preparations_tell_how_far_they_are():
    file, clock = io.StringIO(), Clock()
    console = Console(file, clock=clock)
    for done in range(11):
        console.progress("tokenizing", done, 10, "files")
    console.progress("reading", 5_000_000, 5_000_000)
    assert file.getvalue().splitlines() == ["tokenizing 0/10 files", "tokenizing 10/10 files", "reading 5.0 MB/5.0 MB"]


def test_a_terminal_keeps_the_line_below_the_messages(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Console(file) as console:
        console.progress("tokenizing", 10, 10, "files")
        console.begin(3)
        console.log(1, TRAINING)
        console.message("a message")
        console.log(3, TRAINING)
    shown = file.getvalue()
    assert shown.index("0/3") < shown.index("a message") < shown.rindex("3/3")
    assert "\x1b[2K" in shown  # the line is redrawn
    assert shown.endswith("\x1b[?25h")  # and the cursor is given back


class Recorder:
    def __init__(self, fails: bool = False):
        self.entries: list[tuple] = []
        self.is_closed = False
        self._fails = fails

    def log(self, step, values):
        self.entries.append((step, values))

    def close(self):
        self.is_closed = True
        if self._fails:
            raise OSError("disk full")


def test_every_tracker_gets_the_figures_and_is_closed_though_one_fails():
    trackers = [Recorder(), Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"), Trackers(trackers) as together:
        together.log(1, {"loss": 2.0})
    assert all(tracker.entries == [(1, {"loss": 2.0})] and tracker.is_closed for tracker in trackers)


def test_a_tracker_of_others_never_ends_a_run():
    class Broken:
        def log(self, step, values):
            raise ConnectionError("no network")

        def close(self):
            raise OSError("disk full")

    reports = []
    with Trackers([Guarded(Broken(), reports.append)]) as together:
        for step in (1, 2):
            together.log(step, {"loss": 2.0})
    assert reports == ["A tracker fails; the run continues without it: ConnectionError: no network"]


def test_a_tracker_of_others_that_does_not_open_never_ends_a_run(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    out = io.StringIO()
    with open_trackers([CONFIGS["tensorboard"]], RunInfo(tmp_path, "a", {}), Console(out), True) as trackers:
        trackers.log(1, {"loss": 2.0})
    assert "tensorboard does not open; the run continues without it: NotADirectoryError: " in out.getvalue()
    assert entries(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def tensorboard_records(path) -> list[bytes]:
    """The records of an event file: length, checksum, payload, checksum."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(content[12 : 12 + length])
        content = content[16 + length :]
    return found


def test_tensorboard_gets_the_scalars(tmp_path):
    run = RunInfo(tmp_path, "a run", {"steps": 3})
    with open_trackers([CONFIGS["tensorboard"]], run, Console(io.StringIO()), is_writer=True) as trackers:
        trackers.log(1, {"loss": 2.5, "grad_norm": float("nan")})
    (path,) = (tmp_path / "tensorboard").iterdir()
    records = b"".join(tensorboard_records(path))
    assert b"loss" in records
    assert struct.pack("<f", 2.5) in records
    assert b"grad_norm" not in records
    assert entries(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "grad_norm": None}]


def test_tensorboard_has_every_name_as_it_is(tmp_path):
    names = [re.sub(r"<\w+>", "0", metric.name) for metric in METRICS]
    with open_trackers([CONFIGS["tensorboard"]], RunInfo(tmp_path, "a", {}), Console(io.StringIO()), True) as trackers:
        trackers.log(1, dict.fromkeys(names, 1.0))
    (path,) = (tmp_path / "tensorboard").iterdir()
    records = tensorboard_records(path)
    for name in names:
        field = b"\x0a" + bytes([len(name)]) + name.encode()  # Summary.Value.tag
        assert any(field in record for record in records), name


def test_processes_that_do_not_write_leave_nothing(tmp_path):
    run = RunInfo(tmp_path, "a run", {})
    with open_trackers(list(CONFIGS.values()), run, Console(io.StringIO()), is_writer=False) as trackers:
        trackers.log(1, TRAINING)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_names_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, CONFIGS[name].package, raising=False)
    with pytest.raises(UserError, match=rf"{name} needs the package .* Run `.* '\.\[{name}\]'`"):
        check_installed([CONFIGS[name]])
    assert list(tmp_path.iterdir()) == []
