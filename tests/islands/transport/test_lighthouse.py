"""A real lighthouse and real members on loopback: what they get, and what strangers get.

`test_membership` has the rules, `test_server` what a server refuses. Nothing is asserted that a busy machine breaks.
"""

import json
import math
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from gregale.errors import UserError
from gregale.islands.protocol.messages import FORMAT, LAN, Columns, to_texts, unpack
from gregale.islands.transport.client import PeerClient, RequestRejected
from gregale.islands.transport.coordinator import (
    CoordinatorClient,
    CoordinatorUnreachable,
    NameTaken,
    NotAdmitted,
    RequestDropped,
    headers_of_fleet,
)
from gregale.islands.transport.lighthouse import NAME, Lighthouse, read_records, records_beside
from tests.islands.transport.conftest import TOKEN, WAIT_SECONDS
from tests.waiting import until

TIMING = replace(LAN, heartbeat_seconds=1.0, join_seconds=0.3, retry_seconds=0.1, hold_seconds=0.1)


class Fleet:
    """A coordinator of its own, and members whose requests run in threads."""

    def __init__(self):
        self.said: list[str] = []
        self.lighthouse = Lighthouse("127.0.0.1:0", TOKEN, self.said.append)
        self.members: dict[str, CoordinatorClient] = {}
        self.threads = ThreadPoolExecutor(16)

    def member(self, name: str, token: bytes = TOKEN) -> CoordinatorClient:
        return CoordinatorClient(self.lighthouse.address, name, token, TIMING)

    def join(self, *names: str) -> None:
        """Add members that send heartbeats; return when the coordinator has received one of each."""
        self.members |= {name: self.member(name) for name in names}
        self.wait_for(*(f"{name} joined" for name in names))

    def wait_for(self, *texts: str) -> None:
        """Return when the lighthouse has printed all texts."""
        until(lambda: all(any(text in line for line in self.said) for text in texts), lambda: self.said)

    def ask(self, name: str, x: int = 0, needed: int = 1) -> Future[tuple[int, Columns, int]]:
        return self.threads.submit(self.members[name].ask, {"x": x}, needed)

    def ask_all(self, names: str, x: int = 0) -> list[tuple[int, Columns, int]]:
        return [asked.result() for asked in [self.ask(name, x, len(names)) for name in names]]

    def restart(self, token: bytes = TOKEN) -> None:
        self.lighthouse.close()
        self.lighthouse = Lighthouse(self.lighthouse.address, token, self.said.append)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for member in fleet.members.values():
        member.close()
    fleet.lighthouse.close()


def seen(view: tuple[int, Columns, int]) -> list[tuple[str, int]]:
    return [(header["name"], header["x"]) for header in headers_in(view)]


def headers_in(view: tuple[int, Columns, int]) -> list[dict]:
    keys = list(view[1])
    return [dict(zip(keys, row, strict=True)) for row in zip(*(unpack(view[1], key) for key in keys), strict=True)]


def test_all_members_get_the_same_view_with_everybodys_header(fleet):
    fleet.join("a", "b", "c")
    dropped = fleet.ask("a", 0, needed=4)
    until(lambda: "1 of at least 4 islands are here (a)" in fleet.members["a"].last_heartbeat.held)
    newer = fleet.ask("a", 0, needed=3)
    with pytest.raises(RequestDropped, match="has dropped the request"):
        dropped.result()
    assert not newer.done()
    first = fleet.ask_all("abc", 1)
    assert first[0] == first[1] == first[2]
    assert seen(first[0]) == [("a", 1), ("b", 1), ("c", 1)]
    waiting = [fleet.ask(name, 2) for name in "ab"]
    fleet.members.pop("c").close()
    assert seen(waiting[0].result()) == [("a", 2), ("b", 2)]
    assert "c has left: 2 islands now." in fleet.said
    fleet.members.pop("b").close()
    header = {"text": "x" * 100_000, "nested": {"list": [1, None, "é", 2.5]}}
    assert headers_in(fleet.members["a"].ask(header, 1)) == [{**header, "name": "a"}]


def test_an_island_passes_a_record_on_to_the_coordinators_that_lack_it(fleet, tmp_path):
    paths = [records_beside(tmp_path / name) for name in "xyz"]
    header, record = {"agreement": "the run", "round": 7, "digest": "last"}, (7, "last")
    with ExitStack() as stack:
        lighthouses = [stack.enter_context(closing(Lighthouse("127.0.0.1:0", TOKEN, kept=path))) for path in paths]
        addresses = [each.address for each in lighthouses]
        with closing(CoordinatorClient(addresses[1], "a", TOKEN, TIMING)) as a:  # it reaches this one alone, and ends
            a.ask(header, 1)
            a.saved = record
            until(paths[1].exists)
        late = stack.enter_context(closing(CoordinatorClient(addresses, "late", TOKEN, TIMING)))
        ThreadPoolExecutor(1).submit(late.ask, {**header, "round": -1, "digest": "seed"}, 1)
        until(lambda: all(list(read_records(path).values()) == [record] for path in paths))
        assert late.saved is None


def test_a_last_state_is_recorded_once_and_outlives_the_coordinator(tmp_path):
    path = records_beside(tmp_path / "token")
    first = Lighthouse("127.0.0.1:0", TOKEN, kept=path)
    header = {"agreement": "the run", "round": 7, "digest": "last"}
    with closing(CoordinatorClient(first.address, "a", TOKEN, TIMING)) as a:
        a.ask(header, 1)
        a.saved = 7, "last"
        until(lambda: a.last_heartbeat.recorded == "last")
        first.close()
    (record,) = read_records(path).values()
    assert record == (7, "last")
    second = Lighthouse("127.0.0.1:0", TOKEN, kept=path)
    with closing(second), closing(CoordinatorClient(second.address, "b", TOKEN, TIMING)) as b:
        late = ThreadPoolExecutor(1).submit(b.ask, {**header, "round": -1, "digest": "seed"}, 1)
        b.saved = 7, "other"
        until(lambda: "the run is complete with 7 rounds" in b.last_heartbeat.held)
        assert not late.done()
        assert b.last_heartbeat.recorded in ("", "last")
        assert read_records(path) == {next(iter(read_records(path))): (7, "last")}
    path.write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        Lighthouse("127.0.0.1:0", TOKEN, kept=path)


def test_a_restarted_coordinator_begins_with_a_new_id(fleet):
    fleet.join("a", "b")
    former, *_ = fleet.ask_all("ab")[0]
    waiting = fleet.ask("a")
    fleet.said.clear()
    fleet.lighthouse.close()
    with pytest.raises(CoordinatorUnreachable, match="cannot be reached"):
        waiting.result()
    with pytest.raises(CoordinatorUnreachable, match=fleet.lighthouse.address):
        fleet.members["b"].ask({"x": 0}, 1)
    fleet.restart()
    fleet.wait_for("a joined", "b joined")
    assert abs(fleet.ask_all("ab", 5)[0][0] - former) > 1


def test_who_may_not_join_is_refused_in_one_line_and_the_first_continues(fleet, monkeypatch):
    """One has its name, one another token, and one other messages."""
    fleet.join("a")
    twin, stranger = fleet.member("a"), fleet.member("b", b"another token here")
    with pytest.raises(NameTaken, match=r"islands\.name: .*another process has the name 'a' .*works later") as refused:
        twin.ask({"x": 9}, 1)
    assert refused.value.exit_code == os.EX_TEMPFAIL, "a scheduler may start it again"
    twin.close()
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    assert fleet.said.count("A second island with the name a was refused.") == 1
    with pytest.raises(NotAdmitted, match=r"islands\.lighthouse: .* another token.* islands\.token_file"):
        stranger.ask({"x": 9}, 1)
    stranger.close()
    assert seen(fleet.ask("a", 2).result()) == [("a", 2)]
    refusal = "127.0.0.1 was refused: it has another token, or does not speak TLS"
    fleet.wait_for(refusal)
    assert all(refusal in line for line in fleet.said if "refused" in line and "second" not in line)
    monkeypatch.setattr("gregale.islands.transport.coordinator.FORMAT", 1)
    other = r"islands\.lighthouse: the lighthouse at .* another version of Gregale, with other"
    with closing(fleet.member("b")) as older, pytest.raises(NotAdmitted, match=other):
        older.ask({"x": 9}, 1)


def test_an_island_asks_what_a_fleet_agrees_on_before_it_joins(fleet):
    """Also whether it has the fleet's token and messages; without a fleet or a coordinator nothing is asked."""
    address = [fleet.lighthouse.address]
    assert headers_of_fleet(address, TOKEN) == {}
    fleet.join("a")
    fleet.ask("a", 7).result()
    assert headers_of_fleet(address, TOKEN) == {}, "it has no round yet"
    fleet.members["a"].report(0, None)
    until(lambda: headers_of_fleet(address, TOKEN))
    assert seen((0, headers_of_fleet(address, TOKEN))) == [("a", 7)]
    with pytest.raises(NotAdmitted, match=r"islands\.lighthouse: .* another token.* islands\.token_file"):
        headers_of_fleet(address, b"another token here")
    assert "joined: 2" not in str(fleet.said)
    fleet.lighthouse.close()
    assert headers_of_fleet(address, TOKEN) == {}


@pytest.mark.parametrize(
    ("token", "format", "reason"),
    [(b"another token here", FORMAT, "it has another token"), (TOKEN, 3, "has another version of Gregale")],
)
def test_a_member_that_was_admitted_does_not_end_at_a_refusal(fleet, monkeypatch, token, format, reason):
    """Otherwise somebody on the way could end a fleet by answers in the lighthouse's place."""
    fleet.join("a")
    monkeypatch.setattr("gregale.islands.transport.lighthouse.FORMAT", format)
    fleet.restart(token)
    reasons = []
    for _ in range(3):  # the connection that it had breaks first
        with pytest.raises(CoordinatorUnreachable) as failed:
            fleet.ask("a").result()
        reasons.append(str(failed.value))
    assert "refuses a request" in reasons[-1]
    assert reason in reasons[-1]


def test_reports_of_islands_are_printed_when_rounds_stop(fleet, monkeypatch):
    monkeypatch.setattr("gregale.islands.protocol.stalls.FIRST_ROUND_SECONDS", 0.0)
    fleet.join("a")
    fleet.members["a"].report(4, "b is waited for")
    fleet.wait_for("s: b is waited for; alive, but not asking for a round: a.")
    fleet.members["a"].report(5, None)
    fleet.wait_for("Rounds go on: round 5")


def asked_by_hand(fleet: Fleet, session: str, header: dict, hold_seconds: float = 0.0) -> dict:
    """The answer to a request of the island b that it writes itself."""
    message = {"format": FORMAT, "kind": "ask", "name": "b", "session": session, "number": 1, "needed": 1}
    message |= dict.fromkeys(("run", "state", "recorded"), "") | {"term": 0, "round": 0, "header": header}
    message |= {"hold_seconds": hold_seconds, "gather_seconds": 0.0, "heartbeat_seconds": 2 * WAIT_SECONDS}
    with closing(PeerClient(f"{fleet.lighthouse.address}/{NAME}", TOKEN, WAIT_SECONDS)) as client:
        return client.request("POST", "/message", json.dumps(message).encode())


def test_a_header_that_is_not_of_texts_is_refused_and_the_fleet_goes_on(fleet):
    """A member whose process has an error has the token too. No view could be written as JSON with its number."""
    fleet.join("a", "b")
    with pytest.raises(RequestRejected, match="the values of a header are JSON texts"):
        asked_by_hand(fleet, "s", {"norm": math.nan}, hold_seconds=20.0)
    assert seen(fleet.ask_all("ab", 3)[0]) == [("a", 3), ("b", 3)]


def test_a_host_that_does_not_answer_delays_only_the_requests_of_its_island_and_is_tried_once(fleet, monkeypatch):
    monkeypatch.setattr("gregale.islands.transport.lighthouse.REACH_SECONDS", 2 * WAIT_SECONDS)
    monkeypatch.setattr("gregale.islands.transport.lighthouse.REACH_TRIES", 1)
    silent = socket.create_server(("127.0.0.1", 0))
    hosts = [f"127.0.0.1:{silent.getsockname()[1]}/b:1"]

    for session in ("s", "s", "t"):
        assert asked_by_hand(fleet, session, to_texts({"hosts": hosts})) == {"held": True}
    silent.settimeout(WAIT_SECONDS)
    tried, _ = silent.accept()
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):
        silent.accept()
    silent.close()
    tried.close()
    found = fleet.lighthouse._reached("b", "s", to_texts({"hosts": hosts})["hosts"], WAIT_SECONDS)
    assert found == '["outwards:b:1/b:1"]'
    with pytest.raises(RequestRejected, match="has 1025 hosts; an island has at most 1024"):
        asked_by_hand(fleet, "s", to_texts({"hosts": hosts * 1025}))


def test_invalid_addresses(fleet):
    with pytest.raises(UserError, match=rf"bind: {fleet.lighthouse.address} cannot be listened at \(Address already"):
        Lighthouse(fleet.lighthouse.address, TOKEN)
    with pytest.raises(UserError, match="has to be HOST:PORT"):
        Lighthouse("127.0.0.1", TOKEN)
    with pytest.raises(UserError, match="has to be HOST:PORT"):
        Lighthouse("127.0.0.1:\u0663", TOKEN)
