"""`gregale runs`: its table, its filters and its JSON."""

import json

import pytest

from gregale.cli import main
from gregale.programs.runs import ago
from gregale.runs.run_lock import hold_run_lock
from tests.runs.runs import write_run, write_starts

DILOCO = {"sync": {"type": "streaming_diloco"}, "reduce": {"codec": "int4"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work") / "runs"
    write_run(folder / "whole", 10, saved=10, evaluated=True)
    write_run(folder / "half", 5, saved=4, **DILOCO)
    write_run(folder / "now", 7, saved=4)
    write_run(folder / "new", 0)
    write_run(folder / "broken", 9, saved=8)
    (folder / "broken" / "checkpoints" / "step-00000008" / "arrays").unlink()
    with hold_run_lock(folder / "now"):
        yield folder


@pytest.fixture
def listed(runs, capsys):
    """What the command prints with some arguments."""

    def run(*arguments: str) -> str:
        assert main(["runs", str(runs), *arguments]) == 0
        return capsys.readouterr().out

    return run


def names(printed: str) -> list[str]:
    return [each["name"] for each in json.loads(printed)]


def test_the_table_has_every_run(listed, runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = listed()
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert list(rows) == ["broken", "half", "new", "now", "whole"]
    whole = [cell.strip() for cell in rows["whole"].strip("│").split("│")]
    assert whole[:-1] == ["whole", "complete", "10/10", "3.9000", "3.5000", "psdp", "512", "10.0 kB"]
    assert whole[-1].endswith(" ago")
    assert "streaming_diloco, int4" in rows["half"]
    assert "running" in rows["now"]
    assert "0/10" in rows["new"]
    assert f"broken: {runs}/broken/checkpoints/step-00000008: 1 files are gone or not whole, arrays" in text


def test_a_run_in_stages_has_its_stage(tmp_path, capsys):
    run = write_run(tmp_path / "staged", 5)
    write_starts(run, {"step": 0, "stage": 1, "stages": 3}, {"step": 4, "stage": 2, "stages": 3})
    write_run(tmp_path / "plain", 5)
    assert main(["runs", str(tmp_path)]) == 0
    rows = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "5/10" in line
    ]
    assert [row[4] for row in rows] == ["", "2 of 3"]
    assert main(["watch", "--once", str(run)]) == 0
    assert "step 5 of 10 (50%)  stage 2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["broken", "half", "new", "now", "whole"]),
        (["--state", "complete,running"], ["now", "whole"]),
        (["--method", "*diloco*"], ["half"]),
        (["--name", "n*"], ["new", "now"]),
        (["--sort", "loss"], ["whole", "broken", "now", "half", "new"]),
        (["--sort", "step", "--reverse"], ["whole", "broken", "now", "half", "new"]),
        (["--sort", "eval_loss", "--reverse"], ["whole", "broken", "half", "new", "now"]),
        (["--name", "none"], []),
    ],
)
def test_filters_and_orders(listed, arguments, expected):
    assert names(listed("--json", *arguments)) == expected


def test_json_has_all_figures(listed):
    (found,) = json.loads(listed("--json", "--name", "half"))
    expected = {"state": "stopped", "step": 5, "steps": 10, "saved": 4, "eval_loss": None, "mfu": None, "problem": None}
    assert found.items() >= expected.items()


def test_nothing_there_is_said(listed, refusal, tmp_path, capsys):
    assert "no run matches" in listed("--name", "none")
    assert main(["runs", str(tmp_path)]) == 0
    assert "no run yet" in capsys.readouterr().out
    assert "does not exist" in refusal("runs", tmp_path / "none")
    assert "/etc/passwd is a file; runs lie in a folder" in refusal("runs", "/etc/passwd")
    states = "Valid choices: running, complete, stopped, damaged, imported"
    assert states in refusal("runs", tmp_path, "--state", "ended")


def test_how_long_ago():
    times = {-9: "0 min ago", 59: "0 min ago", 7000: "116 min ago", 7200: "2 h ago", 2e5: "2 days ago"}
    assert {seconds: ago("2026-11-22T10:00:00+00:00", 1795341600.0 + seconds) for seconds in times} == times
    assert ago("yesterday", 0.0) == "yesterday"
