"""Exports beside training, with a program in place of `gregale export`, which tests/programs/test_tasks.py has."""

import sys

import pytest

from gregale.checkpoint.manifest import ExportConfig, folder_name
from gregale.programs.train.exports import Exports
from gregale.runs.run_directory import RunDirectory

# Waits for a file `go` in the run, and makes the folder; fails if there is a file `full`.
WRITER = """
import pathlib, sys, time
run, target, option, step = sys.argv[1:]
while not pathlib.Path(run, "go").exists():
    time.sleep(0.01)
if pathlib.Path(run, "full").exists():
    sys.exit(f"a line before\\ngregale: error: {option} {step}")
pathlib.Path(target).mkdir(parents=True)
pathlib.Path(target, "step").write_text(step)
"""


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_exports_are_made_one_at_a_time_and_the_newest_stay(run, tmp_path):
    said: list[str] = []
    config = ExportConfig(every=10, keep_last=2)
    stale = tmp_path / "exports" / folder_name(20)
    stale.mkdir(parents=True)
    (stale / "of another course").touch()
    with Exports(run, said.append, (sys.executable, "-c", WRITER)) as exports:
        exports.begin(5, config)
        exports.begin(10, config)
        assert exports.in_use == {10}
        exports.begin(20, config)
        assert said == ["The export of step 20 is left out, because that of step 10 is not complete yet."]
        (tmp_path / "go").touch()
        for step in (20, 30, 40):
            exports.wait()
            assert not exports.in_use
            exports.begin(step, config)
    found = sorted((tmp_path / "exports").iterdir())
    assert [path.name for path in found] == [folder_name(30), folder_name(40)], "the end waits for the last one"
    assert [(path / "step").read_text() for path in found] == ["30", "40"]
    folders = {step: tmp_path / "exports" / folder_name(step) for step in (10, 20, 30, 40)}
    assert said[1:] == [f"The export of step {step} is in {folder}." for step, folder in folders.items()]


def test_a_failure_is_a_note(run, tmp_path):
    said: list[str] = []
    for name in ("go", "full"):
        (tmp_path / name).touch()
    with Exports(run, said.append, (sys.executable, "-c", WRITER)) as exports:
        exports.begin(10, ExportConfig(every=10))
        exports.wait()
    assert said == ["The export of step 10 failed, and the run goes on: gregale: error: --step 10"]
    with Exports(run, said.append, ("/no such program",)) as exports:
        exports.begin(10, ExportConfig(every=10))
    assert "No such file or directory" in said[1]
