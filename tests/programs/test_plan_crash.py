"""The end of a process that compiles for `plan`, as a user sees it."""

import pytest
from gregale.programs.plan.crash import last_lines

from gregale.errors import UserError
from gregale.programs.plan.memory_only_compile import Request, reported
from gregale.runs.config import TrainConfig

# From the TPU compiler's log; its stack, its addresses and its report on itself are cut short.
LOG = """WARNING: Logging before InitGoogle() is written to STDERR
E0000 00:00:1795401922.670227    7510 common_lib.cc:554] INVALID_ARGUMENT: Error: unexpected worker hostname
=== Source Location Trace: ===
learning/45eac/tfrc/runtime/libtpu_init_utils.cc:327
F1123 02:45:38.787467    7706 hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)
*** Check failure stack trace: ***
    @     0x7f6f9e89bc54  absl::log_internal::LogMessage::SendToLog()
https://symbolize.stripped_domain/r/?trace=7f6f9e89bc53
*** SIGABRT received by PID 7666 (TID 7706) on cpu 1, si_code=-6, from PID 7666; ***
E1123 02:45:38.852290    7706 coredump_hook.cc:310] RAW: Remote crash data gathering hook invoked.
F1123 02:45:38.787467    7706 hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)
E1123 02:45:38.933351    7706 process_state.cc:708] RAW: Raising signal 6 with default behavior
"""
CHECK = "hlo_alias_analysis.cc:168] Check failed: caller_callsites().size() == 1 (2 vs. 1)"


def test_the_line_with_which_the_compiler_ended_itself_is_found():
    assert last_lines(LOG) == [CHECK]


def test_without_such_a_line_the_last_ones_are_shown():
    assert last_lines("one\ntwo\n\n  @ 0x7 frame\nthree\nMemoryError\n") == ["two", "three", "MemoryError"]


@pytest.mark.parametrize(
    ("end", "expected", "advice"),
    [
        ("os.abort()", r"by SIGABRT \(signal 6\)", "a fault of the compiler"),
        ("os.kill(os.getpid(), 9)", r"by SIGKILL \(signal 9\)", "runs out of memory"),
        ("os._exit(7)", "with exit status 7", "a fault of the compiler"),
    ],
)
def test_what_a_user_sees_of_a_crash(tmp_path, monkeypatch, end, expected, advice):
    """A real process that ends at its start, with a log."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nsys.stderr.write({LOG!r})\nsys.stderr.flush()\n{end}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(UserError, match=f"compiles the program 'step' ended {expected}") as error:
        reported(Request(TrainConfig(name="crash", steps=1), 256, "v5e:2x2", 1), "step", 0)
    said = str(error.value)
    assert "\n" not in said
    assert CHECK in said
    assert advice in said
    (kept,) = tmp_path.glob("gregale-plan-*.log")
    assert str(kept) in said
    assert kept.read_text() == LOG
    assert {each.name for each in tmp_path.glob("gregale-plan-*")} == {kept.name}, "all else is gone"
