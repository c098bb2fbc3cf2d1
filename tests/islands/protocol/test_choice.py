"""Which coordinator an island asks, and under which term."""

from gregale.islands.protocol.choice import Choice
from gregale.islands.protocol.membership import NEVER

HEARTBEAT_SECONDS = 5.0  # a heartbeat a second


def test_the_one_that_hears_most_is_chosen_and_the_first_again_when_it_is_back():
    choice, turns = Choice(2, HEARTBEAT_SECONDS), {}
    for now in range(30):
        for index, hears in enumerate((None if 5 <= now < 15 else 3, 2 if now > 20 else 3)):
            if hears is not None:
                choice.answered(index, hears, now)
        if choice.look(now):
            turns[now] = choice.current
    assert turns == {8: 1, 17: 0}, "after three beats of silence, and two of a better one"


def test_a_request_is_never_sent_under_a_lower_term():
    choice = Choice(2, HEARTBEAT_SECONDS)
    choice.told(0, 9)
    choice.told(1, 4)
    assert choice.request(2, is_fresh=True) == (0, 9, 2)
    for now in (0, 4):
        choice.answered(1, 3, now)
        choice.look(now)
    assert choice.request(2, is_fresh=True) == (1, 9, NEVER), "it tells the other one that its term is too low"
    choice.told(1, 12)
    assert choice.request(2, is_fresh=False) == (1, 12, 2)
    assert Choice(1, HEARTBEAT_SECONDS).request(2, is_fresh=True) == (0, 0, 2)


def test_the_record_of_one_coordinator_is_passed_on_to_the_others_unless_most_have_another():
    choice, own, one, other = Choice(3, HEARTBEAT_SECONDS), (7, "own"), (7, "one"), (7, "other")
    assert choice.to_record(None) is None
    choice.answered(2, 3, 0.0, one)
    assert (choice.recorded, choice.to_record(None)) == (None, one), "this island has no last state, or has died since"
    assert choice.to_record(own) == own, "no majority has another one"
    for index in range(2):
        choice.answered(index, 3, 0.0, other)
    assert choice.recorded == choice.to_record(None) == choice.to_record(own) == other
    halves = Choice(2, HEARTBEAT_SECONDS)
    for index in range(2):
        assert halves.recorded is None, "half of them are no majority"
        halves.answered(index, 3, 0.0, one)
    assert halves.recorded == one
