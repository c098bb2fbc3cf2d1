"""Text reaches the terminal as text; a console that nobody reads any more is silent, and no reason to end."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from gregale.streams import ResilientStream, printable, say
from gregale.terminal import Console, print_table
from gregale.tracking.trackers import Console as Tracker

HOSTILE = "a\x1b[2J\u202e[/b] \x9b1A"
SHOWN = "a\\x1b[2J\\u202e[/b] \\x9b1A"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_consoles_own_codes_reach_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    file, table = Terminal(), Table()
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    console = Console(file=file, width=80)
    console.print(HOSTILE)
    console.print(table)
    shown = file.getvalue()
    assert SHOWN in shown
    assert "\x1b[31ma\\x1b[2J" in shown, "a colour, and the text in it"
    assert not [code for code in ("\x1b[2J", "\u202e", "\x9b") if code in shown]


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_only_a_terminal_wraps_lines(monkeypatch, file):
    monkeypatch.setenv("COLUMNS", "80")
    cell = "word " * 1000 + "end"
    console = Console(file=file)
    console.print(cell)
    print_table(console, "Title", ("", "heading"), [("row", cell)])
    whole = [line for line in file.getvalue().splitlines() if cell in line]
    assert len(whole) == (0 if file.isatty() else 2)


def test_a_notebook_gets_text(monkeypatch):
    shell = type("ZMQInteractiveShell", (), {})()  # by which Rich recognises Jupyter
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    assert RichConsole(file=io.StringIO()).is_jupyter
    Tracker(file := io.StringIO()).message(HOSTILE)
    assert file.getvalue() == f"{SHOWN}\n"


def test_progress_and_messages_of_a_run_are_lines_of_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for file in (Terminal(), io.StringIO()):
        with Tracker(file) as console:
            console.progress(HOSTILE, 1, 2)
            console.message(f"{HOSTILE}\ngregale: all is well")
        assert f"{SHOWN}\\ngregale: all is well" in file.getvalue().replace("\n", "")
        assert file.getvalue().count(SHOWN) >= 2
        assert not [code for code in ("\x1b[2J", "\u202e", "\x9b") if code in file.getvalue()]


# Standard output leads to a pipe without a reader, to a full disk, or to a file that may not grow.
PROGRAM = """
import sys
from gregale.tracking.trackers import Console

with Console() as console:
    console.begin(2)
    for step in (1, 2):
        console.on_step(step, {"loss": 1.0})
        console.message("x" * 100_000)
print("still here", file=sys.stderr)
"""


def without_a_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("where", ["pipe", "/dev/full"])
def test_a_process_goes_on_and_ends_well(where):
    stdout = without_a_reader() if where == "pipe" else os.open(where, os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(stdout)
    assert (done.returncode, done.stderr) == (0, "still here\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [/bold] ü 日本 \u3000 \xa0", "plain [/bold] ü 日本 \u3000 \xa0"),
        ("a\x1b]0;b\x07\r\n\t", "a\\x1b]0;b\\x07\\r\\n\\t"),
        ("\x7f\x9b31m\u2028\u2029", "\\x7f\\x9b31m\\u2028\\u2029"),
        ("\u202eexe.txt\u2066\u200f\ufeff", "\\u202eexe.txt\\u2066\\u200f\\ufeff"),
        ("\udcff \U000e0041", "\\udcff \\U000e0041"),
        ("👩\u200d💻", "👩\u200d💻"),
    ],
)
def test_what_a_terminal_would_act_upon_is_shown_by_its_escape(text, shown):
    assert printable(text) == shown


def test_a_line_that_is_said_is_one_line(capsys):
    say("a name\nof two\x1b[1A lines")
    assert capsys.readouterr().out == "a name\\nof two\\x1b[1A lines\n"


def test_everything_else_is_the_streams_own():
    file = os.fdopen(without_a_reader(), "w")
    stream = ResilientStream(file)
    assert (stream.isatty(), stream.fileno(), stream.encoding) == (False, file.fileno(), file.encoding)
    for _ in range(2):
        assert stream.write("words") == 5
        stream.flush()
    file.close()
