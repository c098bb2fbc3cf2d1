"""Which of several processes hangs, by where their main threads are."""

import pytest

from gregale.distributed.liveness import Phase, Progress, ThreadProgress, find_hung

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
