"""Turns by a clock that the test sets."""

import jax
import pytest

from gregale.checkpoint.manifest import CheckpointConfig
from gregale.distributed.liveness import Elapsed
from gregale.errors import KeyedError


def test_turns_come_once_in_the_time_and_late_ones_once():
    assert due_at([159, 160, 161, 290, 339, 340], begin=None) == [160, 290, 340]
    assert due_at([1019, 1020, 1021, 1080], begin=0.0) == [1020, 1080], "counted from another time"


def test_offsets_keep_turns_of_several_clocks_apart():
    assert due_at([1019, 1020, 1049, 1050, 1080, 1110], begin=0.0, offset=0.5) == [1050, 1110]


def due_at(times: list[float], begin: float | None, offset: float = 0.0) -> list[float]:
    """The times at which a turn once in 60 s is taken, by a clock that begins at 100, or at 1000."""
    now = 100.0 if begin is None else 1000.0
    elapsed = Elapsed(60, lambda: now, begin)
    found = []
    for now in times:
        if elapsed.is_due(0, offset):
            found.append(now)
    return found


def test_the_clock_of_process_0_decides_for_all(monkeypatch):
    """Two processes by turns: their exchange gives each what both had said at the multiple of `check_every` before."""
    said = {}

    class Flags:
        def __init__(self, process: int):
            self.process, self.last = process, None

        def exchanged(self, flag):
            was_any_set = self.last is not None and any(flags[self.last] for flags in said.values())
            self.last = len(said.setdefault(self.process, []))
            said[self.process].append(flag)
            return was_any_set

    now = [0.0, 0.0]
    all_elapsed = [Elapsed(60, lambda number=number: now[number], check_every=2) for number in range(2)]
    for number, elapsed in enumerate(all_elapsed):
        elapsed.__dict__["_processes"] = Flags(number)
    found = [[], []]
    for step in range(1, 13):
        now[:] = [20.0 * step, 1000.0 * step]
        for number, elapsed in enumerate(all_elapsed):
            monkeypatch.setattr(jax, "process_index", lambda number=number: number)
            found[number].append(elapsed.is_due(step))
    assert found[0] == found[1]
    assert [step for step, due in enumerate(found[0], 1) if due] == [6, 8, 12]


@pytest.mark.parametrize(("every", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), (50, None)])
def test_times_of_checkpoints(every, seconds):
    config = CheckpointConfig(every)
    assert (config.steps, config.seconds) == (every if seconds is None else None, seconds)


@pytest.mark.parametrize("every", ["0m", "15", "1.5h", "15 m", "", "m"])
def test_no_time_of_a_checkpoint(every):
    with pytest.raises(KeyedError, match=r"every is '.*'; it is a number of steps, or a time such as 90s"):
        CheckpointConfig(every)
