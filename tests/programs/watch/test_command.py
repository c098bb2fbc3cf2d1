"""`gregale watch`: on a terminal and elsewhere, until the run is complete, is stopped by Ctrl-C, or comes back."""

import os
import signal
import sys
import threading
import urllib.request
from contextlib import contextmanager, redirect_stdout
from queue import Queue

import pytest

from gregale.cli import main
from gregale.programs import live_page
from gregale.runs.history import runs_of
from tests.runs.runs import write_run
from tests.waiting import until


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_once_shows_how_it_is(folder, capsys):
    write_run(folder / "a", 5, saved=4)
    assert main(["watch", "a", "--once"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a stopped  step 5 of 10 (50%)  loss 3.9500  512 tokens/s",
        "a has stopped, step 5 of 10; the command that started it resumes it.",
    ]
    assert main(["watch", "b"]) == 2
    assert "b is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_it_and_gives_the_terminal_back(folder, capsys, monkeypatch, number, code):
    write_run(folder / "a", 5)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(number)

    def stop() -> None:
        until(lambda: signal.getsignal(number) is not before)  # else it would end the tests
        os.kill(os.getpid(), number)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert main(["watch", "runs/a", "--seconds", "0.1"]) == code
    stopping.join()
    printed = capsys.readouterr()
    assert printed.out.count("\x1b[?25l") == printed.out.count("\x1b[?25h") == 1, "the cursor comes back"
    assert "stopped" in printed.out
    assert not printed.err
    assert signal.getsignal(number) is before


def test_a_page_is_served_until_ctrl_c(folder, capsys, monkeypatch):
    """Also when the run is complete: somebody looks at it."""
    write_run(folder / "a", 10, saved=10, evaluated=True)
    addresses, pages, serve = Queue(), [], live_page.served

    @contextmanager
    def served(*arguments):
        with serve(*arguments) as address:
            addresses.put(address)
            yield address

    def read() -> None:
        try:
            with urllib.request.urlopen(addresses.get(timeout=60), timeout=60) as answer:
                pages.append(answer.read().decode())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(live_page, "served", served)
    reader = threading.Thread(target=read)
    reader.start()
    assert main(["watch", "a", "--web", "--seconds", "0.1"]) == 0
    reader.join()
    assert "connect-src 'self'" in pages[0]
    assert "The page is at http://127.0.0.1:" in capsys.readouterr().out
    assert main(["watch", "a", "--web", "--once"]) == 2
    assert "once and web are both given" in capsys.readouterr().err


def test_a_fleet_is_its_islands(folder):
    for name in ("f-a", "f-b"):
        write_run(folder / name, 1)
    (folder / "f.islands").mkdir()
    for name in ("f-a", "f-b", "lighthouse"):
        (folder / "f.islands" / f"{name}.log").touch()
    for word in ("f", "runs/f", "runs/f.islands", str(folder / "f")):
        assert [run.path.name for run in runs_of(word)] == ["f-a", "f-b"]
    assert [run.path.name for run in runs_of("f-a")] == ["f-a"]


def test_islands_are_followed_to_their_end_and_before_all_a_line_says_so(folder, capsys):
    (folder / "f.islands").mkdir(parents=True)
    for name in ("f-a", "f-b", "lighthouse"):
        (folder / "f.islands" / f"{name}.log").touch()
    assert main(["watch", "f"]) == 2
    assert "f is a fleet without a run" in capsys.readouterr().err
    begun = {"saved": 10, "evaluated": True}
    write_run(folder / "f-a", 5)

    def begin() -> None:
        until(lambda: "f-a stopped" in (folder / "said").read_text())
        write_run(folder / "f-b", 10, **begun)
        write_run(folder / "c", 10, **begun)
        (folder / "c" / "metrics.jsonl").rename(folder / "f-a" / "metrics.jsonl")
        for name in ("checkpoints", "newest_checkpoint.json"):
            (folder / "c" / name).rename(folder / "f-a" / name)

    beginning = threading.Thread(target=begin, daemon=True)
    with (folder / "said").open("w", buffering=1) as said, redirect_stdout(said):
        beginning.start()
        assert main(["watch", "f", "--seconds", "0.1"]) == 0
    beginning.join(60)
    lines = (folder / "said").read_text().splitlines()
    for begin in ("f-a step 10: eval loss 3.5000", "f-a is complete, step 10 of 10.", "f-a complete", "f-b complete"):
        assert any(line.startswith(begin) for line in lines), begin
