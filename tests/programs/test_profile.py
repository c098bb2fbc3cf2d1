"""Traces of a few steps of a run: what others open, and that the steps do not notice."""

import gzip
import json
import shutil
from pathlib import Path
from socket import gethostname

import jax
import pytest

from gregale.errors import UserError
from gregale.tracking.profile import ENDINGS, MAX_STEPS, Window
from tests.programs.tiny import EVALUATE, assert_same_state, losses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def traced(inputs, whole) -> Path:
    """The undisturbed run again, with the steps 5 to 7 traced; an evaluation comes after step 6."""
    from gregale.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", "traced", *EVALUATE, "--profile", "5:7"]) == 0
    return inputs / "runs" / "traced"


@pytest.fixture(scope="module")
def files(traced) -> dict[str, Path]:
    """The trace's files by their endings."""
    folder = traced / "profiles" / "steps-5-7"
    assert [path.name for path in folder.iterdir()] == ["plugins"], "nothing unfinished is left"
    found = sorted((folder / "plugins" / "profile" / "steps-5-7").iterdir())
    assert [path.name for path in found] == [f"{gethostname()}-process-0{ending}" for ending in sorted(ENDINGS)]
    return dict(zip(sorted(ENDINGS), found, strict=True))


def test_nothing_changes(traced, whole):
    assert losses(traced) == losses(whole)
    assert_same_state(traced, whole, 12)


def test_perfetto_and_chrome_can_read_it(files):
    with gzip.open(files[".trace.json.gz"]) as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    steps = {event["args"]["step_num"] for event in spans if event["name"] == "train"}
    assert steps == {"5", "6", "7"}


def test_xprof_and_tensorboard_have_what_they_read(files):
    profile = jax.profiler.ProfileData.from_file(str(files[".xplane.pb"]))
    names = {event.name for plane in profile.planes for line in plane.lines for event in line.events}
    assert "train" in names
    assert any("dot" in name for name in names), "single operations are there"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "'5'; it has to be START:STOP"),
        ("5:", "it has to be START:STOP, the first and the last step to trace, for example 20:22"),
        ("-5:6", "it has to be START:STOP"),
        ("0:3", "steps are counted from 1"),
        ("7:5", "step 5 comes before step 7"),
        ("5:1001", "the run has 1000 steps"),
        (f"1:{MAX_STEPS + 1}", f"that is {MAX_STEPS + 1} steps"),
        ("9" * 400 + ":1", "it has to be START:STOP"),
    ],
)
def test_a_wrong_window_is_one_line(text, message):
    with pytest.raises(UserError, match=r"^profile is ") as raised:
        Window.parse(text, 1000)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 200


def test_it_is_said_before_anything_begins(gregale, inputs, capsys):
    assert gregale("train", "tiny.yaml", "--name", "never", "--profile", "5:13") == 2
    assert "profile is 5:13, but the run has 12 steps (`steps`)." in capsys.readouterr().err
    assert not (inputs / "runs" / "never").exists()


def test_steps_that_were_done_before_are_no_reason_to_end(gregale, traced, capsys):
    """A scheduler starts the same command again."""
    (traced / "profiles" / "steps-5-7").rename(traced / "profiles" / "before")
    shutil.rmtree(traced / "checkpoints" / "step-00000012")
    assert gregale("train", "tiny.yaml", "--name", "traced", *EVALUATE, "--profile", "5:7") == 0
    assert "Nothing is traced: the steps 5-7 of --profile were done before." in capsys.readouterr().out
    assert [path.name for path in (traced / "profiles").iterdir()] == ["before"]
