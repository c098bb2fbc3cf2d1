"""Which of several processes hangs, by where their main threads are; and turns by a clock that the test sets."""

import jax
import pytest

from gregale.checkpoint.manifest import CheckpointConfig
from gregale.distributed.liveness import Elapsed, Phase, Progress, ThreadProgress, find_hung
from gregale.errors import KeyedError

SECONDS = 60.0
NOW = 1_000_000.0


def named(places) -> dict[str, ThreadProgress]:
    return {
        f"process {process}": ThreadProgress(steps, Phase(doing), waits, since=NOW - stood)
        for process, steps, doing, waits, stood in places
    }


def test_progress_is_sent_as_text():
    progress = Progress()
    seen = [progress.current]
    progress.at(801, Phase.TRAINING)
    with progress.waiting():
        seen.append(progress.current)
    progress.still()
    seen.append(progress.current)
    assert seen == [
        ThreadProgress(0, Phase.PREPARING, False, 0),
        ThreadProgress(801, Phase.TRAINING, True, 1),
        ThreadProgress(801, Phase.TRAINING, False, 3),
    ]
    assert [ThreadProgress.parse(str(each)) for each in seen] == seen


HANGS = [
    ([(0, 802, "training", True, 61), (1, 801, "training", False, 62), (2, 802, "training", True, 61)],
     "process 1 hangs: it has been for 62 s in step 801."),  # its data do not come
    ([(0, 802, "training", True, 61), (1, 802, "training", True, 62)],
     "All 2 processes hang: they have been for 61 s in step 802, waiting for their devices."),
    ([(0, 801, "training", True, 700), (1, 800, "evaluating", False, 10 * 60 + 1)],
     "process 1 hangs: it has been for 601 s evaluating after 800 steps."),
    ([(0, 1, "compiling", False, 601), (1, 2, "training", True, 610)],
     "process 0 hangs: it has been for 601 s in step 1, which it compiles."),
    ([(0, 900, "ending", False, 9999), (1, 900, "saving", False, 601)],
     "process 1 hangs: it has been for 601 s saving after 900 steps."),  # and another one has ended
    ([(number, 801 + (number > 5), "training", number > 5, 61) for number in range(8)],
     "process 0, process 1, process 2 and 3 more hang: they have been for 61 s in step 801."),
    ([(0, 801, "synchronising", True, 9999), (1, 801, "training", False, 61)],
     "process 1 hangs: it has been for 61 s in step 801."),  # a host of an island, whose process 0 waits for others
]  # fmt: skip

GO_ON = {
    "a slow step": [(0, 802, "training", True, 59), (1, 801, "training", False, 59)],
    "one waits, the other has just begun": [(0, 802, "training", True, 61), (1, 801, "training", False, 1)],
    "one compiles, the others have a cache": [(0, 2, "training", True, 500), (1, 1, "compiling", False, 599)],
    "one waits, the other evaluates": [(0, 801, "training", False, 61), (1, 800, "evaluating", False, 65)],
    "one saves": [(0, 801, "training", True, 599), (1, 800, "saving", False, 599)],
    "the first step of all": [(0, 1, "compiling", True, 599), (1, 1, "compiling", True, 599)],
    "one prepares its data for a day": [(0, 0, "preparing", False, 86400), (1, 801, "compiling", True, 86000)],
    "all hosts of an island wait for others": [(0, 801, "synchronising", True, 9999), (1, 802, "training", True, 9999)],
    "the end": [(0, 900, "ending", False, 86400), (1, 900, "ending", False, 86400)],
}


@pytest.mark.parametrize(("places", "sentence"), HANGS)
def test_who_hangs_is_named(places, sentence):
    assert find_hung(named(places), NOW, SECONDS) == sentence


@pytest.mark.parametrize("places", GO_ON.values(), ids=GO_ON)
def test_work_that_takes_its_time_is_not_a_hang(places):
    assert find_hung(named(places), NOW, SECONDS) is None


@pytest.mark.parametrize(
    ("times", "begin", "offset", "turns"),
    [
        ([159, 160, 161, 290, 339, 340], None, 0.0, [160, 290, 340]),
        ([1019, 1020, 1021, 1080], 0.0, 0.0, [1020, 1080]),  # counted from another time
        ([1019, 1020, 1049, 1050, 1080, 1110], 0.0, 0.5, [1050, 1110]),  # apart from those of another clock
    ],
)
def test_turns_come_once_in_the_time_and_late_ones_once(times, begin, offset, turns):
    """Once in 60 s, by a clock that begins at 100, or at 1000."""
    now = 100.0 if begin is None else 1000.0
    elapsed = Elapsed(60, lambda: now, begin)
    found = []
    for now in times:
        if elapsed.is_due(0, offset):
            found.append(now)
    assert found == turns


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
