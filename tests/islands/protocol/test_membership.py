"""The coordinator's rules: the table of `membership`, event by event, in a time of our own."""

from gregale.islands.protocol.membership import Answer, Ask, Membership

JOIN_SECONDS, HEARTBEAT_SECONDS = 1.0, 5.0


class Fleet:
    """Members that beat whenever the time is set, and their answers."""

    def __init__(self, *names: str, minimum: int = 1, first_id: int = 1):
        self.membership = Membership(minimum, JOIN_SECONDS, HEARTBEAT_SECONDS, first_id)
        self.beating, self.now = dict.fromkeys(names, "s"), 0.0
        self.at(0.0)

    def at(self, now: float) -> list[Answer]:
        """All beat until then."""
        answers = []
        while True:
            self.now = min(self.now + 0.5, now)
            for name, session in self.beating.items():
                self.membership.beat(name, session, self.now)
            answers += self.membership.tick(self.now)
            if self.now == now:
                return answers

    def ask(self, name: str, number: int = 1, session: str = "s", until: float = 1000.0) -> list[Answer]:
        self.membership.ask(Ask(name, session, number, f"{name}{number}{session}", until), self.now)
        return self.membership.tick(self.now)


def seen(answers: list[Answer]) -> list[str]:
    """The headers of the one view in these answers."""
    [view] = {answer.view for answer in answers if answer.view}
    assert {answer.ask for answer in answers if answer.view} == set(view.asks)
    return [ask.header for ask in view.asks]


def test_a_view_waits_for_a_silent_live_member_from_the_oldest_request_on():
    fleet = Fleet("a", "b", "c")
    assert fleet.ask("a") == []
    fleet.at(0.5)
    assert fleet.ask("b") == []
    assert fleet.at(0.9) == []
    assert seen(fleet.at(1.0)) == ["a1s", "b1s"]


def test_the_members_of_the_last_view_are_answered_at_once():
    fleet = Fleet("a", "b", "c", "d")
    for name in "abc":
        fleet.ask(name)
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


def test_half_of_the_live_members_or_fewer_than_the_minimum_get_no_view():
    fleet = Fleet("a", "b")
    fleet.ask("a")
    assert fleet.at(100.0) == []
    few = Fleet("a", minimum=2)
    few.ask("a")
    assert few.at(100.0) == []


def test_dead_members_count_until_their_heartbeats_expire():
    fleet = Fleet("a", "b")
    fleet.at(1.0)
    del fleet.beating["b"]
    fleet.ask("a")
    assert fleet.at(5.9) == []
    assert seen(fleet.at(6.0)) == ["a1s"]


def test_a_member_that_leaves_does_not_count():
    fleet = Fleet("a", "b")
    fleet.ask("a")
    del fleet.beating["b"]
    fleet.membership.leave("b", "another session")
    assert fleet.membership.tick(0.0) == []
    fleet.membership.leave("b", "s")
    assert seen(fleet.membership.tick(0.0)) == ["a1s"]


def test_an_expired_request_is_in_no_view():
    fleet = Fleet("a", "b", "c")
    fleet.ask("a", until=0.7)
    [late] = fleet.at(0.7)
    assert (late.ask.name, late.view, late.refused) == ("a", None, "")
    fleet.ask("b")
    fleet.ask("c")
    assert seen(fleet.at(3.0)) == ["b1s", "c1s"]


def test_an_answered_or_replaced_request_is_in_no_later_view():
    """It may not be true any more: a network may bring it late, or twice."""
    fleet = Fleet("a", "b")
    fleet.ask("a", 3)
    [replaced] = fleet.ask("a", 4)
    assert (replaced.ask.number, replaced.view) == (3, None)
    [late] = fleet.ask("a", 3)
    assert late.view is None
    assert seen(fleet.ask("b")) == ["a4s", "b1s"]
    [twice] = fleet.ask("a", 4)
    assert twice.view is None
    assert fleet.ask("b", 2) == []


def test_a_second_process_of_a_name_is_refused_while_the_first_sends_heartbeats():
    fleet = Fleet("a")
    assert fleet.ask("a", session="twin") == []
    assert fleet.at(0.5) == [], "a heartbeat may have been on its way when the first died"
    [refused] = fleet.at(1.0)
    assert (refused.ask.session, refused.view) == ("twin", None)
    assert "another island of the fleet has the name 'a'" in refused.refused
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
    [refused] = fleet.at(7.5)
    assert refused.refused
    assert seen(fleet.ask("a", 2, session="new")) == ["a2new"]


def test_a_process_that_dies_while_it_claims_its_name_does_not_get_it():
    fleet = Fleet("a", "b")
    del fleet.beating["a"]
    fleet.at(3.0)
    fleet.ask("a", session="new", until=4.0)
    assert [answer.view for answer in fleet.at(4.0)] == [None]
    fleet.ask("b")
    assert seen(fleet.at(5.0)) == ["b1s"]
    assert fleet.membership.healthy == {"b": "s"}
