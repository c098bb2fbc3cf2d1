"""Tables on terminals of any width."""

import io

import pytest
from rich.console import Console

from gregale.terminal import fitting, print_table

HEADINGS = ("kind", "axes", "bytes each time", "note")
ROWS = [
    ("all-gather", "data, model", "1.25 MiB", "[not markup]"),
    ("all-reduce", "-", "4 B", "a note of many words " * 3),
]


def shown(width: int, rows=ROWS) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width), "Collectives", HEADINGS, rows)
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 60, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width):
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Collectives", "all-gather", "data,", "model", "1.25", "MiB", "[not", "4", "words"):
        assert word in text


def test_a_narrow_terminal_has_a_row_a_paragraph_unless_the_table_fits():
    file = io.StringIO()
    print_table(Console(file=file, width=40), "Short", ("a", "b"), [("1", "2")])
    assert "│ 1 │ 2 │" in file.getvalue()
    assert shown(40, ROWS[:1]).splitlines() == [
        "",
        "Collectives",
        "all-gather",
        "  axes data, model; bytes each time 1.25",
        "  MiB; note [not markup]",
    ]


@pytest.mark.parametrize(("width", "kept"), [(200, "abcd"), (24, "abd"), (17, "ab"), (5, "ab")])
def test_columns_go_where_there_is_no_room(width, kept):
    console = Console(file=io.StringIO(), width=width)
    headings, rows = fitting(console, "abcd", [("11", "22", "333333", "4444")], ("c", "d"))
    assert "".join(headings) == kept
    assert len(rows[0]) == len(kept)
