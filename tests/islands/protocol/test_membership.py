"""The coordinator's rules, event by event, in a time of our own; and which coordinator an island asks."""

from gregale.islands.protocol.choice import Choice
from gregale.islands.protocol.membership import NEVER, Answer, Ask, Membership

GATHER_SECONDS, HEARTBEAT_SECONDS = 1.0, 5.0
EARLY_SECONDS = 2.0  # after the start, two heartbeats long, no fleet begins


class Fleet:
    """Members that beat whenever the time is set, and their answers. The time is 0 when a fleet may begin.

    - `running`: names that report a round
    - `asked`: names that have asked once the time is 0
    """

    def __init__(self, *names: str, needed: int = 1, first_id: int = 1, running: str = "", asked: str = ""):
        self.membership, self.needed, self.running = Membership(first_id), needed, running
        self.beating, self.now, self.stopped = dict.fromkeys(names, "s"), -EARLY_SECONDS, 0.0
        self.at(self.now)
        self.at(0.0)
        for name in asked:
            self.ask(name)

    def at(self, now: float) -> list[Answer]:
        """All beat until then."""
        answers = []
        while True:
            self.now = min(self.now + 0.5, now)
            for name, session in self.beating.items():
                self.membership.beat(name, session, HEARTBEAT_SECONDS, (name in self.running) - 1, self.now)
            answers += self.membership.tick(self.now, self.stopped)
            if self.now == now:
                return answers

    def ask(self, name: str, number: int = 1, session: str = "s", needed: int | None = None) -> list[Answer]:
        numbers = needed or self.needed, GATHER_SECONDS, HEARTBEAT_SECONDS
        self.membership.ask(Ask(name, session, number, f"{name}{number}{session}", *numbers), self.now)
        return self.membership.tick(self.now, self.stopped)


def seen(answers: list[Answer]) -> list[str]:
    """The headers of the one view in these answers."""
    [view] = {answer.view for answer in answers if answer.view}
    assert {answer.ask for answer in answers if answer.view} == set(view.asks)
    return [ask.header for ask in view.asks]


def test_a_view_waits_for_a_silent_live_member_once_more_than_half_have_asked():
    """The members of a view pause, and ask again later than one that waits already: it needs them all."""
    fleet = Fleet("a", "b", "c")
    assert fleet.ask("a") == []
    fleet.at(0.5)
    assert fleet.ask("b") == []
    assert fleet.at(1.4) == []
    assert fleet.membership.held("a") == "the coordinator waits for the requests of c, at most 0.1 s more"
    assert seen(fleet.at(1.5)) == ["a1s", "b1s"]


def test_a_request_is_held_until_the_needed_number_has_asked():
    fleet = Fleet("a", "b", "c", needed=3, asked="ab")
    assert fleet.at(1000.0) == []
    few, missing = "2 of at least 3 islands are here (a and b)", "the coordinator waits for the requests of c"
    assert fleet.membership.held("a") == f"{few}; {missing}"
    assert fleet.membership.held("c") == (
        f"the coordinator had no request of this island at its last answer; {few}; {missing}"
    )
    assert seen(fleet.ask("c")) == ["a1s", "b1s", "c1s"]
    assert "waits for the requests of a, b and c" in fleet.membership.held("a")


def test_the_headers_of_a_fleet_are_the_newest_of_the_islands_that_run():
    fleet = Fleet("a", "b", "c", running="ab")
    assert fleet.membership.running == []
    for name, number in (("a", 1), ("b", 1), ("c", 1), ("b", 2)):
        fleet.ask(name, number)
    assert fleet.membership.running == ["a1s", "b2s"]
    del fleet.beating["b"]
    fleet.at(10.0)
    assert fleet.membership.running == ["a1s"]


def test_who_is_not_in_a_round_learns_which_islands_are():
    """The island d comes back while a and c are in a reduce with b, which cannot receive and has given it up."""
    fleet = Fleet("a", "b", "c", running="abc", asked="abc")
    fleet.beating["d"] = "s"
    fleet.ask("b", 2)
    fleet.ask("d")
    waits = "the coordinator waits for the requests of a and c"
    assert fleet.membership.held("d") == f"{waits}; the last view has a, b and c"
    assert fleet.membership.held("b") == waits


def test_an_island_of_a_running_fleet_needs_fewer_than_those_that_join_it():
    fleet = Fleet("a", "b", running="a")
    fleet.ask("b", needed=3)
    assert fleet.at(1000.0) == []
    assert seen(fleet.ask("a", needed=1)) == ["a1s", "b1s"]


def test_no_fleet_begins_beside_one_that_runs():
    """The running island makes a long interval of steps: it is alive, and has no request."""
    fleet = Fleet("a", "b", "c", running="a", asked="bc")
    assert fleet.at(1000.0) == []
    assert fleet.membership.held("b") == "the coordinator waits for the requests of a"
    assert seen(fleet.ask("a")) == ["a1s", "b1s", "c1s"]


def test_no_fleet_begins_before_a_restarted_coordinator_can_know_of_one_that_runs():
    fleet = Fleet()
    fleet.membership = Membership()
    assert fleet.ask("b") == []
    assert fleet.membership.tick(EARLY_SECONDS - 0.1) == []
    assert fleet.membership.held("b") == "the coordinator waits 0.1 s more for heartbeats of a fleet that runs"
    assert seen(fleet.membership.tick(EARLY_SECONDS)) == ["b1s"]


def test_no_fleet_begins_just_after_the_coordinator_was_stopped():
    """The heartbeats of an island of a running fleet may wait behind the request that is read first."""
    fleet = Fleet("a")
    fleet.stopped = 30.0
    assert fleet.ask("a") == []
    fleet.membership.beat("b", "s", HEARTBEAT_SECONDS, 0, fleet.now)
    assert fleet.at(EARLY_SECONDS) == [], "b runs"


def test_a_lost_answer_is_given_again():
    fleet = Fleet("a", "b")
    fleet.ask("a", 3)
    first = fleet.ask("b")
    [again] = fleet.ask("a", 3)
    assert again.view is next(answer.view for answer in first if answer.ask.name == "a")
    assert fleet.ask("b", 2) == []


def test_a_repeated_request_does_not_begin_the_wait_again():
    fleet = Fleet("a", "b", "c", asked="ab")
    fleet.at(0.9)
    [replaced] = fleet.ask("a")
    assert (replaced.ask.number, replaced.view) == (1, None)
    assert seen(fleet.at(1.0)) == ["a1s", "b1s"]


def test_the_members_of_the_last_view_are_answered_at_once():
    fleet = Fleet("a", "b", "c", "d", asked="abc")
    assert seen(fleet.at(1.0)) == ["a1s", "b1s", "c1s"]
    for name in "ab":
        assert fleet.ask(name, 2) == []
    assert seen(fleet.ask("c", 2)) == ["a2s", "b2s", "c2s"]


def test_ids_count_changes_of_membership():
    fleet = Fleet("a", first_id=40)
    ids = [answer.view.id for number in (1, 2) for answer in fleet.ask("a", number) if answer.view]
    assert ids == [40, 40]
    fleet.beating["b"] = "s"
    fleet.at(1.0)
    fleet.ask("b")
    assert {answer.view.id for answer in fleet.ask("a", 3) if answer.view} == {41}


def test_half_of_the_live_members_get_no_view_and_dead_members_count_until_their_heartbeats_expire():
    fleet = Fleet("a", "b", asked="a")
    assert fleet.at(100.0) == []
    del fleet.beating["b"]
    assert fleet.at(104.9) == []
    assert seen(fleet.at(105.0)) == ["a1s"]


def test_a_member_that_leaves_does_not_count():
    fleet = Fleet("a", "b", asked="a")
    del fleet.beating["b"]
    fleet.membership.leave("b", "another session")
    assert fleet.membership.tick(0.0) == []
    fleet.membership.leave("b", "s")
    assert seen(fleet.membership.tick(0.0)) == ["a1s"]


def test_a_replaced_request_is_in_no_later_view():
    """It may not be true any more: a network may bring it late, or twice."""
    fleet = Fleet("a", "b")
    fleet.ask("a", 3)
    [replaced] = fleet.ask("a", 4)
    assert (replaced.ask.number, replaced.view) == (3, None)
    [late] = fleet.ask("a", 3)
    assert late.view is None
    assert seen(fleet.ask("b")) == ["a4s", "b1s"]


def test_a_request_that_has_ended_is_in_no_view_after_a_silence_of_its_process():
    """A stopped process repeats it when it goes on; or the network brings it late."""
    fleet = Fleet("a", "b", asked="a")
    assert seen(fleet.ask("b")) == ["a1s", "b1s"]
    del fleet.beating["a"]
    fleet.at(2 * HEARTBEAT_SECONDS)
    assert fleet.membership.healthy == {"b": "s"}
    fleet.beating["a"], fleet.running = "s", "ab"
    [repeated] = fleet.ask("a")
    assert repeated.view is None
    assert fleet.ask("b", 2) == []
    assert seen(fleet.ask("a", 2)) == ["a2s", "b2s"]


def test_a_second_process_of_a_name_is_refused_while_the_first_sends_heartbeats():
    fleet = Fleet("a")
    assert fleet.ask("a", session="twin") == []
    assert fleet.at(4.5) == [], "heartbeats may have been on their way when the first died"
    assert fleet.ask("a", session="twin")[0].refused == ""
    assert fleet.at(5.5) == [], "and its host may have ended it since"
    [refused] = fleet.at(6.0)
    assert (refused.ask.session, refused.view) == ("twin", None)
    assert refused.refused == "another process has the name 'a' and has sent heartbeats for 6 s since"
    assert seen(fleet.ask("a")) == ["a1s"]


def test_a_restarted_process_gets_its_name_when_the_dead_one_is_silent():
    fleet = Fleet("a")
    del fleet.beating["a"]
    fleet.at(3.0)
    assert fleet.ask("a", session="new") == []
    assert fleet.at(4.9) == []
    assert seen(fleet.at(5.0)) == ["a1new"]
    fleet.beating["a"] = "new"
    fleet.at(6.0)
    fleet.ask("a", 2)  # the former one was stopped, not dead
    fleet.at(9.0)
    fleet.ask("a", 2)
    [refused] = fleet.at(12.0)
    assert refused.refused
    assert seen(fleet.ask("a", 2, session="new")) == ["a2new"]


def test_a_process_that_dies_while_it_claims_its_name_does_not_get_it():
    fleet = Fleet("a", "b")
    del fleet.beating["a"]
    fleet.at(3.0)
    fleet.ask("a", session="new")
    fleet.at(5.0)
    assert seen(fleet.ask("b")) == ["a1new", "b1s"], "it is alive as far as anybody knows"
    fleet.ask("b", 2)
    assert seen(fleet.at(8.0)) == ["b2s"]
    assert fleet.membership.healthy == {"b": "s"}


def test_a_request_of_a_higher_term_begins_a_term_above_it_and_ends_the_requests_that_are_held():
    """Otherwise a member could be in a later view with a request that is older than one at another coordinator."""
    fleet = Fleet("a", "b", first_id=7)
    for name, term in (("a", 7), ("b", 3)):
        fleet.membership.ask(Ask(name, "s", 1, name, 2, GATHER_SECONDS, HEARTBEAT_SECONDS, term), fleet.now)
    assert [answer.ask.name for answer in fleet.at(0.1)] == ["b"], "its term is too low"
    other = 5 * 2**48 + 9
    fleet.membership.ask(Ask("b", "s", 2, "b", 2, GATHER_SECONDS, HEARTBEAT_SECONDS, other), fleet.now)
    assert fleet.membership.term == 6 * 2**48 + 7
    assert {answer.ask.name for answer in fleet.at(0.2) if not answer.view} == {"a", "b"}
    for name in "ab":
        fleet.membership.ask(Ask(name, "s", 3, name, 2, GATHER_SECONDS, HEARTBEAT_SECONDS, 6 * 2**48 + 7), fleet.now)
    [view] = {answer.view for answer in fleet.at(0.3)}
    assert view
    assert view.stamp > (other + 1) * 2**32


def test_a_member_that_asks_elsewhere_is_not_waited_for_and_may_begin_no_fleet():
    fleet = Fleet("a", "b", asked="b")
    for here in (True, False):
        fleet.membership.beat("b", "s", HEARTBEAT_SECONDS, -1, fleet.now, here)
    fleet.beating.pop("b")
    assert seen(fleet.ask("a")) == ["a1s"]
    assert (
        "a fleet begins at the first coordinator only"
        in (fleet.ask("a", 2, needed=NEVER), fleet.membership.held("a"))[1]
    )


def test_islands_wait_for_one_that_has_the_recorded_last_state():
    """They were silent when the others ended, or come later: alone they would end with other parameters."""

    def ask(name: str, number: int, round: int, run: str = "run", **more: str) -> list[Answer]:
        numbers = 1, GATHER_SECONDS, HEARTBEAT_SECONDS
        asked = Ask(name, "s", number, f"{name}{number}s", *numbers, round=round, run=run, **more)
        fleet.membership.ask(asked, fleet.now)
        return fleet.membership.tick(fleet.now)

    fleet = Fleet("late")
    assert fleet.membership.record("run", (120, "last"))
    assert not fleet.membership.record("run", (120, "other")), "the first one counts"
    assert ask("late", 1, 119, state="old") == []
    assert "the run is complete with 120 rounds" in fleet.membership.held("late")
    fleet.beating["a"] = "s"
    fleet.at(1.0)
    assert seen(ask("a", 1, 120, state="last")) == ["a1s", "late1s"]
    both = ask("late", 2, 120, state="last") + ask("a", 2, 120, state="last")
    assert seen(fleet.at(3.0) + both) == ["a2s", "late2s"]

    fleet = Fleet("b")
    fleet.membership.record("run", (120, "last"))
    assert seen(ask("b", 1, 3, "another run")) == ["b1s"]
    assert ask("b", 2, -1, state="seed") == [], "it would begin the run anew"
    assert not any(answer.view for answer in ask("b", 3, 120, state="other"))
    assert seen(ask("b", 4, 120, state="other", recorded="other")) == ["b4s"], "most coordinators know better"

    again = Fleet("c")
    again.membership = Membership(1, fleet.membership.complete)
    again.membership.record("run", (120, "other"))
    assert again.membership.complete == {"run": (120, "last")}, "a coordinator that starts again knows it"


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
