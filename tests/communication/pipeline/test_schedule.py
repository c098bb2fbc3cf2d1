"""The pipeline's arithmetic, against a slow simulation that moves items from stage to stage."""

from collections import deque

import pytest

from gregale.communication.pipeline import Item, Schedule
from gregale.errors import UserError

# (S, M, R, F)
TABLE = [(2, 2, 1, 1), (2, 6, 4, 2), (3, 9, 3, 2), (4, 8, 1, 2), (5, 5, 3, 1)]
EXPECTED_ITERATIONS = {(4, 4, 2, 1): 11, (4, 8, 2, 1): 19, (4, 8, 2, 2): 22, (3, 9, 3, 1): 29}


def simulated(S: int, M: int, R: int, F: int) -> list[list[Item | None]]:
    """What each stage does in each iteration: everything is done as early as it can be, first come first served.

    A stage has a queue. What it does in iteration t is in the next stage's queue from t + F on; from the last stage an
    item goes to the queue of stage 0 until it has passed the stages R times.
    """
    queues = [deque() for _ in range(S)]
    queues[0].extend((0, Item(m, 0)) for m in range(M))
    rows: list[list[Item | None]] = []
    finished = 0
    while finished < M:
        t, row = len(rows), []
        arrivals = []
        for s, queue in enumerate(queues):
            item = queue.popleft()[1] if queue and queue[0][0] <= t else None
            row.append(item)
            if item is None:
                continue
            if s < S - 1:
                arrivals.append((s + 1, item))
            elif item.repeat < R - 1:
                arrivals.append((0, Item(item.microbatch, item.repeat + 1)))
            else:
                finished += 1
        for s, item in arrivals:
            queues[s].append((t + F, item))
        rows.append(row)
    return rows


@pytest.mark.parametrize("numbers", TABLE)
def test_the_schedule_is_what_a_simulation_of_queues_does(numbers):
    schedule = Schedule(*numbers)
    rows = simulated(*numbers)
    assert schedule.iterations == len(rows)
    assert rows == [[schedule.item(s, t) for s in range(schedule.stages)] for t in range(len(rows))]


@pytest.mark.parametrize("numbers", TABLE)
def test_the_window_holds_the_weights_of_every_item_and_outputs_wait_for_their_turn(numbers):
    """Slots are filled once a repeat: at its start `w_now` takes what `w_next` was, and `w_next` the new repeat's."""
    _, M, R, F = numbers
    schedule = Schedule(*numbers)
    w_now = w_next = None
    for t in range(schedule.iterations):
        if t % M == 0:
            w_now, w_next = w_next, t // M
        for s, (n, takes_next) in enumerate(zip(schedule.item_numbers(t), schedule.uses_next(t), strict=True)):
            item = schedule.item(s, t)
            used = w_next if takes_next else w_now
            assert 0 <= schedule.microbatch_numbers(t)[s] < M
            if item is not None:
                assert used == item.repeat
                assert n == item.repeat * M + schedule.microbatch_numbers(t)[s]
            else:
                assert used is not None, "idle stages compute with real weights"
        if item is not None and item.repeat < R - 1:  # of the last stage
            assert schedule.item(0, t + F + schedule.waiting) == Item(item.microbatch, item.repeat + 1)


@pytest.mark.parametrize("numbers", EXPECTED_ITERATIONS)
def test_iterations_and_bubble(numbers):
    schedule = Schedule(*numbers)
    assert schedule.iterations == EXPECTED_ITERATIONS[numbers]
    idle = sum(schedule.item(s, t) is None for t in range(schedule.iterations) for s in range(schedule.stages))
    assert schedule.bubble == pytest.approx(idle / schedule.stages / schedule.iterations)


def test_picture_of_which_a_long_one_is_cut():
    """In the middle of a repeat the stages are at two repeats at once: a window of one slot would be wrong."""
    lines = Schedule(2, 2, 2).picture().splitlines()
    assert lines == ["iteration  0  1  2  3  4", "stage 0   0a 1a 0b 1b  .", "stage 1    . 0a 1a 0b 1b"]
    lines = Schedule(2, 64).picture(max_iterations=6).splitlines()
    assert lines[1].split() == ["stage", "0", "0a", "1a", "2a", "...", "62a", "63a", "."]
    assert all(len(line) <= len(lines[0]) for line in lines)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((1, 4), ["mesh.stage is 1", "at least 2"]),
        ((4, 6), ["pipeline.microbatches is 6", "6 / 4 = 1.5", "4 or 8"]),
        ((4, 0), ["pipeline.microbatches is 0"]),
        ((4, 2), ["pipeline.microbatches is 2", "pipeline.microbatches 4 would work"]),
        ((4, 4, 2, 2), ["2 x 4 = 8", "pipeline.microbatches to 8", "delay_forwarding"]),
        ((4, 4, 0), ["pipeline.repeats is 0"]),
        ((4, 4, 1, 3), ["forwarding is 3"]),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, words):
    with pytest.raises(UserError) as error:
        Schedule(*numbers)
    assert all(word in str(error.value) for word in words)


def test_layers_that_the_stages_do_not_divide_are_refused():
    schedule = Schedule(4, 8, 2)
    assert schedule.layers_per_stage(16) == 2
    with pytest.raises(UserError, match=r"model.layers is 12: .* 4 x pipeline.repeats 2 = 8 .* 1.5") as error:
        schedule.layers_per_stage(12)
    assert "model.layers 8 or 16 would work, or pipeline.repeats 1 or 3" in str(error.value)
