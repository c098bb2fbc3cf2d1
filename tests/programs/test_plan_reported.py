"""Compiling as far as the memory report: it is ended in time, and by whatever ends this process."""

import os
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.programs.plan import memory_only_compile as module
from gregale.programs.plan.compiling import REPORT, SCHEDULE, read_dump
from gregale.programs.plan.memory_only_compile import Request, reported
from gregale.runs.config import TrainConfig


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


def test_nothing_is_left_of_one_that_is_interrupted(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    seen = []

    def interrupted(seconds):
        seen.extend(compiling())
        if seen:  # at its very start a process has no command line yet
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reported(Request(TrainConfig(name="any", steps=1), 257, "v5e:2x2", 1), "step", 0)
    assert len(seen) == 1
    assert compiling() == []
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_ours_is_not_hidden():
    told = r"(?s)the program 'step' ended with exit status 1 before .*no-such-chip.* a fault of the compiler or"
    with pytest.raises(UserError, match=told):
        reported(Request(TrainConfig(name="any", steps=1), 257, "no-such-chip:2x2", 1), "step", 0)


def test_a_report_that_is_not_whole_is_not_believed(tmp_path):
    (tmp_path / f"module.step{SCHEDULE}").write_text("HloModule step\n")
    (tmp_path / f"module.step{REPORT}").write_text("Memory Space: default (color=0)\nTotal by")
    with pytest.raises(UserError, match="no memory report of the program 'step'"):
        read_dump(tmp_path, 0, None, "step")


def test_the_step_is_read_not_what_was_compiled_beside_it(tmp_path):
    for name, total, text in (("beside", 5, "HloModule beside"), ("step", 7 << 30, "HloModule step, with more in it")):
        (tmp_path / f"{name}{SCHEDULE}").write_text(text)
        (tmp_path / f"{name}{REPORT}").write_text(f"Memory Space: default (color=0)\nTotal bytes: {total} (some)\n")
    found = read_dump(tmp_path, 3 << 30, None, "step")
    assert found.text == "HloModule step, with more in it"
    assert (found.memory.peak, found.memory.arguments, found.memory.temporaries) == (7 << 30, 3 << 30, 4 << 30)
    assert found.shortage is None
