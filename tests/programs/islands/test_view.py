"""What a fleet shows, in a file and on a terminal's table, and who comes and goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gregale.programs.islands.view import FleetView, changes, fitting, in_words

TRAINING = {
    "state": "training",
    "step": 12,
    "steps": 60,
    "loss": 1.2345,
    "tokens_per_second": 1234.5,
    "round": 3,
    "members": ["a", "b"],
    "waiting_seconds": 0.25,
    "network_bytes_sent": 2_000_000,
}


def test_a_plain_line_names_every_island():
    file = io.StringIO()
    with FleetView(file, plain_seconds=0) as view:
        view.show({"a": TRAINING, "b": {}})
        view.show({"a": TRAINING, "b": TRAINING})
    assert file.getvalue().splitlines() == [
        "round 3, 2 members, 1,234 tokens/s; a step 12/60, loss 1.2345; b starting",
        "round 3, 2 members, 2,469 tokens/s; a step 12/60, loss 1.2345; b step 12/60, loss 1.2345",
    ]


def test_before_the_first_step_there_are_no_figures():
    early = {"state": "joining", "step": 0, "steps": 60, "round": -1, "members": []}
    assert in_words({"a": early, "b": {}}) == "a joining; b starting"
    assert in_words({"a": {**TRAINING, "loss": None}}).endswith("a step 12/60, loss -")


def test_the_table_has_a_row_for_each():
    file = io.StringIO()
    console = Console(file=file, width=100)
    console.print(fitting({"a": TRAINING, "b": {}}, console))
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert all(word in lines[1] for word in ("12/60", "1.2345", "0.2 s", "2.0 MB"))


@pytest.mark.parametrize("width", [80, 60, 40, 28])
def test_a_narrow_terminal_has_whole_columns(width):
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(fitting({"quickstart-a": TRAINING, "quickstart-b": {}}, console))
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert "quickstart-a" in lines[1]
    assert "12/60" in lines[1]
    assert "…" not in lines[1]


def test_who_comes_and_who_goes():
    before = {"a": {**TRAINING, "members": ["a", "b"]}}
    now = {"a": {**TRAINING, "round": 4, "members": ["a", "c"]}}
    assert changes(before, now) == ["c is in the fleet", "b is out of the fleet"]
    assert changes({"a": {}}, now) == []


def test_that_rounds_have_stopped_is_told_once():
    before, now = {"a": TRAINING, "b": {}}, {"a": {**TRAINING, "stalled": "No round for 9 s: b is missing."}, "b": {}}
    assert changes(before, now)[0] == "a: No round for 9 s: b is missing."
    assert changes(now, now) == []
