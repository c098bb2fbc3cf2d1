"""Compiling as far as the memory report: it is ended in time, by whatever ends this process, and a crash is told."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.programs.plan import step as module
from gregale.programs.plan.step import MEMORY_REPORT, SCHEDULE, Request, last_lines, read_dump, reported
from gregale.runs.config import TrainConfig

ANY = Request(TrainConfig(name="any", steps=1), 257, "v5e:2x2", 1)
# From the TPU compiler's log, cut short.
LOG = """WARNING: Logging before InitGoogle() is written to STDERR
E0000 00:00:1795401922.670227    7510 common_lib.cc:554] INVALID_ARGUMENT: Error: unexpected worker hostname
=== Source Location Trace: ===
F1123 02:45:38.787467    7706 hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)
*** Check failure stack trace: ***
    @     0x7f6f9e89bc54  absl::log_internal::LogMessage::SendToLog()
F1123 02:45:38.787467    7706 hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)
"""
CHECK = "hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)"


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_lines_with_which_a_compiler_ended_are_found():
    assert last_lines(LOG) == [CHECK]
    assert last_lines("one\ntwo\n\n  @ 0x7 frame\nthree\nMemoryError\n") == ["two", "three", "MemoryError"]


@pytest.mark.parametrize(
    ("end", "expected", "advice"),
    [
        ("os.abort()", r"by SIGABRT \(signal 6\)", "a fault of the compiler"),
        ("os.kill(os.getpid(), 9)", r"by SIGKILL \(signal 9\)", "runs out of memory"),
        ("os._exit(7)", "with exit status 7", "a fault of the compiler"),
    ],
)
def test_what_a_user_sees_of_a_crash(temporary, monkeypatch, end, expected, advice):
    """A real process that ends at its start, with a log."""
    (temporary / "sitecustomize.py").write_text(
        f"import os, sys\nsys.stderr.write({LOG!r})\nsys.stderr.flush()\n{end}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(temporary))
    with pytest.raises(UserError, match=f"compiles the program 'step' ended {expected}") as error:
        reported(ANY, "step", 0)
    said = str(error.value)
    assert "\n" not in said
    assert CHECK in said
    assert advice in said
    (kept,) = temporary.glob("gregale-plan-*.log")
    assert str(kept) in said
    assert kept.read_text() == LOG
    assert {each.name for each in temporary.glob("gregale-plan-*")} == {kept.name}, "all else is gone"


def compiling() -> list[str]:
    """The command lines of this process's children that compile."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if "gregale.programs.plan.compile_worker" in words and str(os.getpid()) in words:
            found.append(" ".join(words))
    return found


def test_nothing_is_left_of_one_that_is_interrupted(monkeypatch, temporary):
    seen = []

    def interrupted(seconds):
        seen.extend(compiling())
        if seen:  # at its very start a process has no command line yet
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reported(ANY, "step", 0)
    assert len(seen) == 1
    assert compiling() == []
    assert list(temporary.iterdir()) == []


def test_a_mistake_of_ours_is_not_hidden():
    told = r"(?s)the program 'step' ended with exit status 1 before .*no-such-chip.* a fault of the compiler or"
    with pytest.raises(UserError, match=told):
        reported(replace(ANY, topology="no-such-chip:2x2"), "step", 0)


def test_a_report_that_is_not_whole_is_not_believed(tmp_path):
    (tmp_path / f"module.step{SCHEDULE}").write_text("HloModule step\n")
    (tmp_path / f"module.step{MEMORY_REPORT}").write_text("Memory Space: default (color=0)\nTotal by")
    with pytest.raises(UserError, match="no memory report of the program 'step'"):
        read_dump(tmp_path, 0, None, "step")


def test_the_step_is_read_not_what_was_compiled_beside_it(tmp_path):
    for name, total, text in (("beside", 5, "HloModule beside"), ("step", 7 << 30, "HloModule step, with more in it")):
        (tmp_path / f"{name}{SCHEDULE}").write_text(text)
        (tmp_path / f"{name}{MEMORY_REPORT}").write_text(
            f"Memory Space: default (color=0)\nTotal bytes: {total} (some)\n"
        )
    found = read_dump(tmp_path, 3 << 30, None, "step")
    assert found.text == "HloModule step, with more in it"
    assert (found.memory.peak, found.memory.arguments, found.memory.temporaries) == (7 << 30, 3 << 30, 4 << 30)
    assert found.shortage is None
