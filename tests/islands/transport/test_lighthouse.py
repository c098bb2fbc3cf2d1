"""A real lighthouse and real members on loopback: what they get, and what strangers get.

`test_membership` has the rules, `test_server` what a server refuses. Nothing is asserted that a busy machine breaks.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gregale.errors import UserError
from gregale.islands.transport.client import PeerClient, PeerUnreachable
from gregale.islands.transport.coordinator import (
    CoordinatorClient,
    CoordinatorTimeout,
    CoordinatorUnreachable,
    NotAdmitted,
    View,
)
from gregale.islands.transport.lighthouse import ALIAS, Quorum, serve
from tests.islands.transport.conftest import TOKEN

QUORUM = Quorum(minimum=1, join_seconds=0.3, heartbeat_seconds=1.0)
WAIT_SECONDS = 20.0


class Fleet:
    """A coordinator of its own, and members whose requests run in threads."""

    def __init__(self):
        self.said: list[str] = []
        self.lighthouse = serve("127.0.0.1:0", TOKEN, QUORUM, self.said.append)
        self.members: dict[str, CoordinatorClient] = {}
        self.threads = ThreadPoolExecutor(16)

    def member(self, name: str, token: bytes = TOKEN) -> CoordinatorClient:
        return CoordinatorClient(self.lighthouse.address, name, token, QUORUM.heartbeat_seconds)

    def join(self, *names: str) -> None:
        """Add members that send heartbeats; return when the coordinator has received one of each."""
        self.members |= {name: self.member(name) for name in names}
        self.wait_for(*(f"{name} joined" for name in names))

    def wait_for(self, *texts: str) -> None:
        """Return when the lighthouse has printed all texts."""
        until = time.monotonic() + WAIT_SECONDS
        while missing := [text for text in texts if not any(text in line for line in self.said)]:
            assert time.monotonic() < until, f"{missing} in {self.said}"
            time.sleep(0.02)

    def ask(self, name: str, x: int = 0, seconds: float = WAIT_SECONDS) -> Future[View]:
        return self.threads.submit(self.members[name].ask, {"x": x}, seconds)

    def ask_all(self, names: str, x: int = 0) -> list[View]:
        return [asked.result() for asked in [self.ask(name, x) for name in names]]

    def restart(self, token: bytes = TOKEN) -> None:
        self.lighthouse.close()
        self.lighthouse = serve(self.lighthouse.address, token, QUORUM, self.said.append)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for member in fleet.members.values():
        member.close()
    fleet.lighthouse.close()


def seen(view: View) -> list[tuple[str, int]]:
    return [(header["name"], header["x"]) for header in view.headers]


def test_all_members_get_the_same_view_with_everybodys_header(fleet):
    fleet.join("a", "b", "c")
    with pytest.raises(CoordinatorTimeout, match="has not answered in time"):
        fleet.ask("a", 0, seconds=0.1).result()
    first = fleet.ask_all("abc", 1)
    assert first[0] == first[1] == first[2]
    assert seen(first[0]) == [("a", 1), ("b", 1), ("c", 1)]
    waiting = [fleet.ask(name, 2) for name in "ab"]
    fleet.members.pop("c").close()
    assert seen(waiting[0].result()) == [("a", 2), ("b", 2)]
    assert "c has left: 2 islands now." in fleet.said
    fleet.members.pop("b").close()
    header = {"text": "x" * 100_000, "nested": {"list": [1, None, "é", 2.5]}}
    assert fleet.members["a"].ask(header, WAIT_SECONDS).headers == [{**header, "name": "a"}]


def test_a_restarted_coordinator_begins_with_a_new_id(fleet):
    fleet.join("a", "b")
    former = fleet.ask_all("ab")[0]
    waiting = fleet.ask("a")
    fleet.said.clear()
    fleet.lighthouse.close()
    with pytest.raises(CoordinatorUnreachable, match="cannot be reached"):
        waiting.result()
    with pytest.raises(CoordinatorUnreachable, match=fleet.lighthouse.address):
        fleet.members["b"].ask({"x": 0}, 5.0)
    fleet.restart()
    fleet.wait_for("a joined", "b joined")
    assert abs(fleet.ask_all("ab", 5)[0].id - former.id) > 1


def test_a_second_island_of_a_name_is_refused_in_one_line_and_the_first_continues(fleet):
    fleet.join("a")
    twin = fleet.member("a")
    with pytest.raises(NotAdmitted, match=r"islands\.name: .*another island of the fleet has the name 'a'"):
        twin.ask({"x": 9}, WAIT_SECONDS)
    twin.close()
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    assert fleet.said.count("A second island with the name a was refused.") == 1


def test_another_token_ends_only_the_island_that_has_it(fleet):
    fleet.join("a")
    stranger = fleet.member("b", b"another token here")
    with pytest.raises(NotAdmitted, match=r"islands\.lighthouse: .* another token.* islands\.token_file"):
        stranger.ask({"x": 9}, WAIT_SECONDS)
    stranger.close()
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    [line] = [line for line in fleet.said if "refused" in line]
    assert "127.0.0.1 was refused: it has another token, or does not speak TLS" in line


def test_a_member_that_was_admitted_does_not_end_at_a_refusal(fleet):
    """Otherwise somebody on the way could end a fleet by answers in the lighthouse's place."""
    fleet.join("a")
    fleet.restart(b"another token here")
    reasons = []
    for _ in range(3):  # the connection that it had breaks first
        with pytest.raises(CoordinatorUnreachable) as failed:
            fleet.ask("a").result()
        reasons.append(str(failed.value))
    assert "refuses a request" in reasons[-1]
    assert "it has another token" in reasons[-1]


def test_the_name_that_all_lighthouses_have_is_of_no_use_but_for_the_status(fleet):
    greeting = PeerClient(f"{fleet.lighthouse.address}/{ALIAS}", TOKEN, WAIT_SECONDS)
    assert greeting.request("GET", "/status") == {"recipient": fleet.lighthouse._server.recipient}
    with pytest.raises(PeerUnreachable, match="is not the expected server"):
        greeting.request("POST", "/message", b'{"kind":"leave","name":"a","session":"s"}')
    greeting.close()


def test_reports_of_islands_are_printed_when_rounds_stop(fleet, monkeypatch):
    monkeypatch.setattr("gregale.islands.protocol.news.FIRST_ROUND_SECONDS", 0.0)
    fleet.join("a")
    fleet.members["a"].report(4, "b is waited for")
    fleet.wait_for("s: b is waited for; alive, but not asking for a round: a.")
    fleet.members["a"].report(5, None)
    fleet.wait_for("Rounds go on: round 5")
    fleet.said.clear()
    fleet.wait_for("No round for")
    fleet.members["a"].ask({"round": 6}, WAIT_SECONDS)
    fleet.wait_for("Rounds go on: round 6")


def test_invalid_addresses(fleet):
    with pytest.raises(UserError, match=rf"bind: {fleet.lighthouse.address} cannot be listened at \(Address already"):
        serve(fleet.lighthouse.address, TOKEN, QUORUM)
    with pytest.raises(UserError, match="has to be HOST:PORT"):
        serve("127.0.0.1", TOKEN, QUORUM)
