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


def test_what_is_no_run_is_passed_over(here):
    for name in ("ref", "file", "mine"):
        make_run(f"runs/{name}")
    Path("ref").mkdir()
    Path("file").touch()
    assert [find_run(name).path for name in ("ref", "file")] == [Path("runs/ref"), Path("runs/file")]
    make_run("elsewhere/ref")
    assert find_run("elsewhere/ref").path == Path("elsewhere/ref")
    assert find_run(str(here / "elsewhere/ref")).path == here / "elsewhere/ref"


def test_two_runs_of_one_name_are_refused_and_a_path_chooses(here, monkeypatch):
    make_run("ref")
    make_run("runs/ref")
    with pytest.raises(UserError, match=r"^ref could be \./ref or runs/ref: .* give one as a path\.$"):
        find_run("ref")
    for path in ("./ref", "runs/ref", str(here / "ref")):
        assert find_run(path).path.absolute() == (here / path).absolute()
    monkeypatch.chdir(here / "runs")
    assert find_run("ref").path.absolute() == here / "runs" / "ref"


def test_what_is_no_run_is_said_with_the_runs_that_there_are():
    for name in ("n" * 300, "a\0b", ""):
        with pytest.raises(UserError, match="is not a run directory"):
            find_run(name)
    Path("ref").mkdir()
    with pytest.raises(UserError, match=r"ref has no config.yaml and runs/ref does not exist\. `gregale train` makes"):
        find_run("ref")
    make_run("runs/other")
    with pytest.raises(UserError, match=r"The runs here are other\.$"):
        find_run("ref")
