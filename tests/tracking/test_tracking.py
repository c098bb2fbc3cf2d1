"""Figures arrive where they should, whole, once, and in words that fit."""

import io
import json
import os
import re
import struct
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.programs.train.step_log import Rate
from gregale.storage import RetryPolicy, jsonl, storage_path
from gregale.tracking.callback import Callbacks, RunInfo
from gregale.tracking.metrics import METRICS, metric_of
from gregale.tracking.trackers import (
    Console,
    Guarded,
    JsonlTracker,
    Tracker,
    TrackerConfig,
    check_installed,
    kept_id,
    open_trackers,
)
from tests.disk import largest_file
from tests.stores import Fault, proxied
from tests.test_terminal import Terminal

CONFIGS = {name: choice() for name, choice in TrackerConfig.get_known_choices().items()}
TRAINING = {"loss": 2.5, "grad_norm": 0.5, "tokens": 4096, "tokens_per_second": 12345.6, "step_seconds": 30.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entries(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_jsonl_has_an_object_a_line_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, TRAINING)
    tracker.log(1, {"eval_loss": jnp.float32(1.5), "bits_per_byte": np.float32(2.25)})
    assert entries(tmp_path / "metrics.jsonl") == [
        {"step": 1, **TRAINING},
        {"step": 1, "eval_loss": 1.5, "bits_per_byte": 2.25},
    ]
    no_numbers = [float("nan"), float("inf"), None, jnp.float32("nan")]
    for value in no_numbers:
        tracker.log(3, {"loss": value, "tokens": 1})
    tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[2:] == ['{"step": 3, "loss": null, "tokens": 1}'] * len(no_numbers)


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


def test_resuming_drops_what_a_killed_run_wrote_later_and_tells_once_of_damaged_lines(tmp_path):
    path, reports = tmp_path / "metrics.jsonl", []
    kept = ['{"step": 1}', '{"step": 2}', '{"step": 2}', '{"step": 3, "note": "\u2028"}']
    lines = [*kept, "[" * 9999, '{"step": 4}', '{"step": 1, "lo']
    path.write_bytes("\n".join(lines).encode().replace(b'{"step": 2}', b'{"step": 2, "loss": \xfe}\n{"step": 2}', 1))
    for _ in range(2):
        tracker = JsonlTracker(path, resumed_from=3, report=reports.append)
        tracker.log(4, {"loss": 1.0})
        tracker.close()
        assert [entry["step"] for entry in entries(path)] == [1, 2, 2, 3, 4]
    assert reports == [f"{path}: 2 of 7 lines are damaged, the first is line 2; they are left out."]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


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


def test_lines_are_written_before_a_checkpoint_counts_and_at_the_end(s3):
    tracker = JsonlTracker(s3 / "metrics.jsonl")
    tracker.log(1, {"loss": 2.0})
    assert not (s3 / "metrics.jsonl").exists(), "not with every line"
    tracker.flush()
    assert entries(s3 / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    for step in (2, 3):
        tracker.log(step, {"loss": float("nan")})
    tracker.close()
    assert entries(s3 / "metrics.jsonl")[1:] == [{"step": step, "loss": None} for step in (2, 3)]
    resumed = JsonlTracker(s3 / "metrics.jsonl", resumed_from=2)
    resumed.log(3, {"loss": 1.0})
    resumed.close()
    assert [(line["step"], line["loss"]) for line in entries(s3 / "metrics.jsonl")] == [(1, 2.0), (2, None), (3, 1.0)]
    JsonlTracker(s3 / "metrics.jsonl", resumed_from=1).close()
    assert entries(s3 / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_lines_are_written_after_a_while_and_kept_while_the_store_is_away(s3, s3_endpoint, monkeypatch):
    monkeypatch.setattr(jsonl, "FLUSH_SECONDS", 0.05)
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
        assert entries(to) == [{"step": 1, "loss": 2.0}]
        proxy.faults[:] = [Fault("denied", 1000, "PUT")]
        tracker.log(2, {"loss": 2.0})
        with pytest.raises(UserError, match=r"metrics.jsonl lacks its last 1 lines\. .*the store refused access"):
            tracker.close()


def test_other_trackers_of_a_run_in_a_store_have_a_folder_here(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunInfo(s3 / "a", "a", {}).files.absolute() == tmp_path / "trackers" / "a"
    assert os.listdir("trackers") == ["a"]
    assert RunInfo(tmp_path / "a", "a", {}).files == tmp_path / "a"


def test_the_rate_is_of_the_window_and_leaves_out_the_first_step():
    rate = Rate(now=1000.0, window=4)
    assert (rate.tokens_per_second, rate.step_seconds) == (0.0, 0.0)
    rate.completed(tokens=100, now=1010.0)  # compilation
    assert (rate.tokens_per_second, rate.step_seconds) == (10.0, 10.0)
    rate.completed(tokens=100, now=1010.5)
    assert (rate.tokens_per_second, rate.step_seconds) == (200.0, 0.5)
    for step in range(1, 8):
        rate.completed(tokens=100, now=1010.5 + step * 2.0)
    assert (rate.tokens_per_second, rate.step_seconds) == (50.0, 2.0)
    rate = Rate(now=5.0)
    rate.completed(tokens=10, now=5.0)
    assert rate.tokens_per_second == 0.0, "no time has passed"


def test_plain_lines_come_at_intervals_with_the_first_and_the_last():
    file, clock = io.StringIO(), Clock()
    console = Console(file, fields=["replica_bytes"], interval_seconds=5.0, clock=clock)
    console.begin(100)
    for step in range(1, 101):
        clock.now += 0.125
        console.on_step(step, TRAINING | {"replica_bytes": 2_500_000})
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[:3] == [
        "step 0/100  compiling the first step",
        "step 1/100  loss 2.5000  30s, compiling included",
        "step 41/100  loss 2.5000  12,346 tokens/s  replica bytes 2.5 MB  ETA 29m 30s",
    ]
    assert [line.split("/")[0] for line in lines[1:]] == ["step 1", "step 41", "step 81", "step 100"]


def test_a_run_that_goes_on_compiles_too_and_evaluations_and_messages_are_always_shown():
    file = io.StringIO()
    console = Console(file, interval_seconds=0)
    console.begin(9, done=4)
    console.on_step(5, TRAINING)
    console.on_step(6, TRAINING)
    for _ in range(2):
        console.on_evaluation(6, {"eval_loss": 1.25, "bits_per_byte": 1.803})
        console.message("checkpoint [4] saved")
    console.begin(9, done=9)
    assert file.getvalue().splitlines() == [
        "step 4/9  compiling the first step",
        "step 5/9  loss 2.5000  30s, compiling included",
        "step 6/9  loss 2.5000  12,346 tokens/s  ETA 1m 30s",
        *["step 6/9  eval loss 1.2500  bits per byte 1.803", "checkpoint [4] saved"] * 2,
    ]


def test_preparations_tell_how_far_they_are():
    file = io.StringIO()
    console = Console(file, clock=Clock())
    for done in range(11):
        console.progress("tokenizing", done, 10, "files")
    console.progress("reading", 5_000_000, 5_000_000)
    assert file.getvalue().splitlines() == ["tokenizing 0/10 files", "tokenizing 10/10 files", "reading 5.0 MB/5.0 MB"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_progress_line_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    with Console(file, fields=["replica_bytes"]) as console:
        console.begin(1000)
        console.on_step(1, TRAINING)
        console.on_step(999, TRAINING | {"replica_bytes": 2_500_000, "step_seconds": 3000.0})
    drawn = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", file.getvalue())]
    assert max(map(len, drawn)) <= columns
    last = [line for line in drawn if "999/1000" in line][-1]
    assert "loss 2.5000" in last
    assert last.rstrip().endswith("ETA 50m 00s")
    assert ("replica bytes" in last) == (columns == 120)


def test_a_terminal_keeps_the_line_below_the_messages(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file, seconds = Terminal(), iter((0.0, 1.0, 61.0))
    with Console(file, clock=lambda: next(seconds)) as console:
        console.progress("tokenizing", 10, 10, "files")
        console.begin(3)
        console.on_step(1, TRAINING)
        console.message("a message")
        console.on_step(2, TRAINING)
        console.on_step(3, TRAINING)
    shown = file.getvalue()
    assert [f"step {step}/3  loss" in shown for step in (1, 2, 3)] == [True, False, True], "one a minute stays"
    assert shown.index("0/3") < shown.index("a message") < shown.rindex("3/3")
    assert "\x1b[2K" in shown  # the line is redrawn
    assert shown.endswith("\x1b[?25h")  # and the cursor is given back


class Recorder(Tracker):
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
    with pytest.raises(UserError, match=r"Recorder\.close raised OSError .*disk full"), Callbacks(trackers) as together:
        together.on_step(1, {"loss": 2.0})
    assert all(tracker.entries == [(1, {"loss": 2.0})] and tracker.is_closed for tracker in trackers)


def test_a_tracker_of_others_never_ends_a_run():
    class Broken(Tracker):
        def log(self, step, values):
            raise ConnectionError("no network")

        def close(self):
            raise OSError("disk full")

    reports = []
    with Callbacks([Guarded(Broken(), "broken", reports.append)]) as together:
        for step in (1, 2):
            together.on_step(step, {"loss": 2.0})
    place = f"{__file__}, line {Broken.log.__code__.co_firstlineno + 1}"
    text = f"log of a plugin raised ConnectionError ({place}): no network."
    assert reports == [f"The tracker broken fails; the run continues without it: {text}"]


def test_a_tracker_of_others_that_does_not_open_never_ends_a_run(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    out = io.StringIO()
    with open_trackers([CONFIGS["tensorboard"]], [], RunInfo(tmp_path, "a", {}), Console(out)) as trackers:
        trackers.on_step(1, {"loss": 2.0})
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


def test_tensorboard_gets_every_number_under_its_name(tmp_path):
    names = [re.sub(r"<\w+>", "0", metric.name) for metric in METRICS]
    with open_trackers([CONFIGS["tensorboard"]], [], RunInfo(tmp_path, "a", {}), Console(io.StringIO())) as trackers:
        trackers.on_step(1, {**dict.fromkeys(names, 1.0), "loss": 2.5, "grad_norm": float("nan")})
    (path,) = (tmp_path / "tensorboard").iterdir()
    records = tensorboard_records(path)
    for name in names:
        tag = b"\x0a" + bytes([len(name)]) + name.encode()  # Summary.Value.tag
        assert any(tag in record for record in records) == (name != "grad_norm"), name
    assert struct.pack("<f", 2.5) in b"".join(records)
    (line,) = entries(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"]) == (2.5, None)


def test_a_resumed_run_has_its_id_at_wandb(tmp_path):
    first = kept_id(RunInfo(tmp_path, "a", {}))
    assert kept_id(RunInfo(tmp_path, "a", {}, resumed_from=10)) == first
    assert kept_id(RunInfo(tmp_path, "a", {})) != first, "begun anew"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_names_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, CONFIGS[name].package, raising=False)
    with pytest.raises(UserError, match=rf"{name} needs the package .* Run `.* '\.\[{name}\]'`"):
        check_installed([CONFIGS[name]])
    run = RunInfo(tmp_path, "a run", {}, is_writer=False)
    with open_trackers(list(CONFIGS.values()), [], run, Console(io.StringIO())) as trackers:
        trackers.on_step(1, TRAINING)
    assert list(tmp_path.iterdir()) == [], "a process that does not write needs no package and leaves nothing"


def test_every_metric_is_found_by_a_name_of_it():
    for metric in METRICS:
        name = metric.name.replace("<replica>", "3").replace("<part>", "layer.7.mlp").replace("<source>", "news")
        assert metric_of(name.replace("<task>", "sums").replace("<figure>", "acc_norm")) is metric
    for name in ("los", "loss_", "loss_x", "grad_norm/", "eval_loss.", "tokensX"):
        assert metric_of(name) is None
