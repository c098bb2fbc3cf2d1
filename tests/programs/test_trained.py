"""Which directory a run's name stands for."""

from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.programs.runtime.trained_model import find_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(path: str) -> None:
    Path(path).mkdir(parents=True)
    (Path(path) / "config.yaml").touch()


@pytest.mark.parametrize("beside", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_what_is_no_run_is_passed_over(beside):
    make_run("runs/ref")
    beside(Path("ref"))
    assert find_run("ref").path == Path("runs/ref")


def test_a_run_outside_of_runs_is_found(here):
    make_run("elsewhere/ref")
    make_run("mine")
    Path("runs/mine").mkdir(parents=True)
    assert find_run("mine").path == Path("mine")
    assert find_run("elsewhere/ref").path == Path("elsewhere/ref")
    assert find_run(str(here / "mine")).path == here / "mine"


def test_two_runs_of_one_name_are_refused_and_a_path_chooses(here):
    make_run("ref")
    make_run("runs/ref")
    with pytest.raises(UserError, match=r"^ref could be \./ref or runs/ref: .* give one as a path\.$"):
        find_run("ref")
    for path in ("./ref", "runs/ref", str(here / "ref")):
        assert find_run(path).path.resolve() == (here / path).resolve()


def test_a_run_within_runs_is_found_from_there(monkeypatch, here):
    make_run("runs/ref")
    monkeypatch.chdir(here / "runs")
    assert find_run("ref").path.resolve() == here / "runs" / "ref"


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", ""])
def test_impossible_names_are_no_runs(name):
    with pytest.raises(UserError, match="is not a run directory"):
        find_run(name)


def test_what_is_no_run_is_said_with_the_runs_that_there_are():
    Path("ref").mkdir()
    with pytest.raises(UserError, match=r"ref has no config.yaml and runs/ref does not exist\. `gregale train` makes"):
        find_run("ref")
    make_run("runs/other")
    with pytest.raises(UserError, match=r"The runs here are other\.$"):
        find_run("ref")
