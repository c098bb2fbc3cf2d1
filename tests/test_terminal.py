"""Text reaches the terminal as text."""

import io

from rich.table import Table
from rich.text import Text

from gregale.terminal import Console
from gregale.tracking.console import Console as Tracker

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
