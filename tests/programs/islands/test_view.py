"""What a fleet shows, in a file and on a terminal's table, and who comes and goes."""

from __future__ import annotations

import io

from rich.console import Console

from gregale.programs.islands.view import FleetView, changes, in_words, table

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
    assert file.getvalue() == "a: training, step 12/60, loss 1.2345, 1,234 tokens/s, round 3, 2 members; b: starting\n"


def test_the_table_has_a_row_for_each():
    console = Console(file=io.StringIO(), width=100)
    console.print(table({"a": TRAINING, "b": {}}))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert all(word in lines[1] for word in ("12/60", "1.2345", "0.2 s", "2.0 MB"))


def test_a_status_without_a_loss_yet():
    assert in_words("a", {**TRAINING, "loss": None}).count("loss -") == 1


def test_who_comes_and_who_goes():
    before = {"a": {**TRAINING, "members": ["a", "b"]}}
    now = {"a": {**TRAINING, "round": 4, "members": ["a", "c"]}}
    assert changes(before, now) == ["c is in the fleet", "b is out of the fleet"]
    assert changes({"a": {}}, now) == []
