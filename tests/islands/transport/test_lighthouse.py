"""A real lighthouse and real members on loopback: what they get, and what strangers get.

`test_membership` has the rules. The join timeout is 0.6 s and a heartbeat lasts 1.5 s; nothing is asserted that a busy
machine breaks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from gregale.errors import UserError
from gregale.islands.transport import listener
from gregale.islands.transport.client import PeerClient, PeerUnreachable
from gregale.islands.transport.coordinator import (
    CoordinatorClient,
    CoordinatorTimeout,
    CoordinatorUnreachable,
    NotAdmitted,
    View,
)
from gregale.islands.transport.lighthouse import ALIAS, Quorum, serve
from gregale.islands.transport.server import Server, call
from tests.islands.transport.conftest import TOKEN

QUORUM = Quorum(minimum=1, join_seconds=0.6, heartbeat_seconds=1.5)
NOTHING = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
IDLE_SECONDS = 20.0


class Fleet:
    """A coordinator of its own, and members whose requests run in threads."""

    def __init__(self, quorum: Quorum = QUORUM):
        self.quorum, self.said = quorum, []
        self.lighthouse = serve("127.0.0.1:0", TOKEN, quorum, self.said.append)
        self.members: dict[str, CoordinatorClient] = {}
        self.threads = ThreadPoolExecutor(16)

    def join(self, *names: str, way: str | None = None) -> None:
        """Members that beat; returns when the coordinator has heard of each."""
        for name in names:
            address = way or self.lighthouse.address
            self.members[name] = CoordinatorClient(address, name, TOKEN, self.quorum.heartbeat_seconds)
        self.wait_for(*(f"{name} joined" for name in names))

    def wait_for(self, *texts: str) -> None:
        """Returns when the lighthouse has said all of it."""
        until = time.monotonic() + IDLE_SECONDS
        while missing := [text for text in texts if not any(text in line for line in self.said)]:
            assert time.monotonic() < until, f"{missing} in {self.said}"
            time.sleep(0.02)

    def ask(self, name: str, x: int = 0, seconds: float = IDLE_SECONDS) -> Future[View]:
        return self.threads.submit(self.members[name].ask, {"x": x}, seconds)

    def ask_all(self, names: str, x: int = 0) -> list[View]:
        """All ask at nearly the same time."""
        return [asked.result() for asked in [self.ask(name, x) for name in names]]

    def restart(self) -> None:
        self.lighthouse.close()
        self.lighthouse = serve(self.lighthouse.address, TOKEN, self.quorum, self.said.append)

    def end(self) -> None:
        for member in self.members.values():
            member.close()
        self.lighthouse.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


def seen(view: View) -> list[tuple[str, int]]:
    return [(header["name"], header["x"]) for header in view.headers]


def sent(address: str, content: bytes) -> bytes:
    """All that comes back for these bytes."""
    host, _, port = address.partition("/")[0].partition(":")
    with socket.create_connection((host, int(port)), IDLE_SECONDS) as connection:
        connection.sendall(content)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


class Tap:
    """Somebody on the way to a server who writes down every request, as an attacker would."""

    def __init__(self, target: str):
        self.target, self.captured = target.partition("/")[0], []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def requests(self, word: bytes) -> list[bytes]:
        """What has passed with this word in it."""
        return [request for request in self.captured if word in request]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, port = self.target.split(":")
                far = socket.create_connection((host, int(port)))
                threading.Thread(target=self._copy, args=(near, far, self.captured), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, []), daemon=True).start()

    def _copy(self, origin: socket.socket, target: socket.socket, captured: list[bytes]) -> None:
        request = b""
        with suppress(OSError):
            while content := origin.recv(1 << 16):
                request = content if content.startswith((b"GET ", b"POST ")) else request + content
                captured[:] = [each for each in captured if not request.startswith(each)] + [request]
                target.sendall(content)
        for connection in (origin, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def test_all_get_the_same_view_with_everybodys_header(fleet):
    fleet.join("a", "b", "c")
    first = fleet.ask_all("abc", 1)
    assert first[0] == first[1] == first[2]
    assert seen(first[0]) == [("a", 1), ("b", 1), ("c", 1)]
    second = fleet.ask_all("abc", 2)
    assert second[0].id == first[0].id
    assert seen(second[0]) == [("a", 2), ("b", 2), ("c", 2)]


def test_a_large_header_arrives(fleet):
    fleet.join("a")
    header = {"text": "x" * 100_000, "nested": {"list": [1, None, "é", 2.5]}}
    assert fleet.members["a"].ask(header, IDLE_SECONDS).headers == [{**header, "name": "a"}]


def test_a_request_that_times_out_is_in_no_view(fleet):
    fleet.join("a", "b", "c")
    with pytest.raises(CoordinatorTimeout, match=r"has not answered in time"):
        fleet.ask("a", 1, seconds=0.1).result()
    assert seen(fleet.ask_all("bc", 2)[0]) == [("b", 2), ("c", 2)]


def test_a_view_does_not_wait_for_a_member_that_left(fleet):
    fleet.join("a", "b")
    waiting = fleet.ask("a", 1)
    fleet.members["b"].close()
    assert seen(waiting.result()) == [("a", 1)]
    assert "b has left: 1 island now." in fleet.said


def test_a_restarted_coordinator_begins_with_a_new_id(fleet):
    fleet.join("a", "b")
    former = fleet.ask_all("ab")[0]
    waiting = fleet.ask("a")
    fleet.said.clear()
    fleet.lighthouse.close()
    with pytest.raises(CoordinatorUnreachable, match=r"cannot be reached"):
        waiting.result()
    with pytest.raises(CoordinatorUnreachable, match=fleet.lighthouse.address):
        fleet.members["b"].ask({"x": 0}, 5.0)
    fleet.restart()
    fleet.wait_for("a joined", "b is here")
    assert abs(fleet.ask_all("ab", 5)[0].id - former.id) > 1


def test_a_second_island_of_a_name_is_refused_in_one_line_and_the_first_continues(fleet):
    fleet.join("a")
    twin = CoordinatorClient(fleet.lighthouse.address, "a", TOKEN, QUORUM.heartbeat_seconds)
    with pytest.raises(NotAdmitted, match=r"islands\.name: .*another island of the fleet has the name 'a'"):
        twin.ask({"x": 9}, IDLE_SECONDS)
    twin.close()
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    assert fleet.said.count("A second island with the name a was refused.") == 1


def test_a_killed_and_restarted_island_has_its_name_after_a_heartbeat(fleet):
    fleet.join("a")
    killed = fleet.members.pop("a")
    killed._closed.set()  # beats no more, and says nothing
    fleet.members["a"] = CoordinatorClient(fleet.lighthouse.address, "a", TOKEN, QUORUM.heartbeat_seconds)
    assert seen(fleet.ask("a", 2).result()) == [("a", 2)]
    with pytest.raises(NotAdmitted):  # it was stopped, not dead
        killed.ask({"x": 1}, IDLE_SECONDS)


def test_another_token_ends_only_the_island_that_has_it(fleet):
    fleet.join("a")
    stranger = CoordinatorClient(fleet.lighthouse.address, "b", b"another token here", QUORUM.heartbeat_seconds)
    with pytest.raises(NotAdmitted, match=r"islands\.lighthouse: .* another token.* islands\.token_file"):
        stranger.ask({"x": 9}, IDLE_SECONDS)
    stranger.close()
    assert seen(fleet.ask("a", 1).result()) == [("a", 1)]
    [line] = [line for line in fleet.said if "refused" in line]
    assert "127.0.0.1 was refused: its signature is missing or wrong" in line


def test_a_member_that_was_admitted_does_not_end_at_a_refusal(fleet):
    """Somebody on the way could end a fleet else, by answering in the lighthouse's place."""
    fleet.join("a")
    fleet.lighthouse.close()
    fleet.lighthouse = serve(fleet.lighthouse.address, b"another token here", QUORUM)
    reasons = []
    for _ in range(3):  # the connection that it had breaks first
        with pytest.raises(CoordinatorUnreachable) as failed:
            fleet.ask("a").result()
        reasons.append(str(failed.value))
    assert "refuses a request" in reasons[-1]
    assert "it has another token" in reasons[-1]


def test_unauthenticated_clients_neither_read_nor_slow_a_fleet(fleet):
    """Eight invented members beat and ask, unsigned or wrongly signed, while one of three islands is stopped."""
    fleet.join("a", "b", "c")
    fleet.ask_all("abc")
    stopped = fleet.members.pop("c")
    stopped._closed.set()
    answers = []
    for number in range(8):
        body = b'{"kind":"beat","name":"ghost%d","session":"s","round":9,"stalled":""}' % number
        for path in (b"/message", b"/status", b"/", b"/manifest"):
            answers.append(
                sent(
                    fleet.lighthouse.address,
                    b"POST %s HTTP/1.1\r\nX-Signature: 00\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body),
                )
            )
    answers += [sent(fleet.lighthouse.address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")]
    assert set(answers) == {NOTHING}
    assert seen(fleet.ask_all("ab", 1)[0]) == [("a", 1), ("b", 1)]
    assert not any("ghost" in line for line in fleet.said)
    assert sum("was refused" in line for line in fleet.said) <= listener.LINES_AT_ONCE


def test_silent_connections_do_not_keep_a_fleet_out(fleet):
    host, port = fleet.lighthouse.address.split(":")
    held = [socket.create_connection((host, int(port)), 5.0) for _ in range(2 * listener.MAX_UNIDENTIFIED)]
    for each in held[-4:]:
        each.sendall(b"POST /message HTTP/1.1\r\n")
    fleet.join("a", "b")
    assert seen(fleet.ask_all("ab", 1)[0]) == [("a", 1), ("b", 1)]
    for each in held:
        each.close()


def test_a_captured_request_is_refused_by_other_servers_and_later_by_the_same(fleet):
    tap = Tap(fleet.lighthouse.address)
    fleet.join("a", way=tap.address)
    fleet.ask("a", 1).result()
    other = serve("127.0.0.1:0", TOKEN, QUORUM)
    island = Server("127.0.0.1", TOKEN, lambda message: pytest.fail("it was taken"))
    captured = tap.requests(b'"ask"') + tap.requests(b'"beat"')
    assert len(captured) >= 2
    for request in captured:
        assert [sent(each.address, request) for each in (other, island)] == [NOTHING, NOTHING]
        again = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        assert b"was already used" in sent(fleet.lighthouse.address, again)
    fleet.members.pop("a").close()
    fleet.restart()
    fleet.said.clear()
    for request in captured:
        assert sent(fleet.lighthouse.address, request) == NOTHING
    assert not any(" joined" in line for line in fleet.said)
    greeting = PeerClient(f"{fleet.lighthouse.address}/{ALIAS}", TOKEN, IDLE_SECONDS)
    with pytest.raises(PeerUnreachable, match=r"another token"):  # by a name that all lighthouses have
        greeting.request("POST", "/message", b'{"kind":"leave","name":"a","session":"s"}')
    other.close()
    island.close()


def test_a_request_to_an_island_is_refused_by_another_one_and_by_the_lighthouse(fleet):
    taken = []
    one = Server("127.0.0.1", TOKEN, lambda message: taken.append(message) or {})
    other = Server("127.0.0.1", TOKEN, lambda message: pytest.fail("it was taken"))
    tap = Tap(one.address)
    call(f"{tap.address}/{one.recipient}", TOKEN, {"kind": "due", "round": 5}, IDLE_SECONDS)
    [captured] = tap.requests(b'"due"')
    assert [sent(address, captured) for address in (other.address, fleet.lighthouse.address)] == [NOTHING, NOTHING]
    assert taken == [{"kind": "due", "round": 5}]
    one.close()
    other.close()


def test_reports_of_islands_are_printed_when_rounds_stop(fleet, monkeypatch):
    monkeypatch.setattr("gregale.islands.protocol.news.FIRST_ROUND_SECONDS", 0.0)
    fleet.join("a")
    fleet.members["a"].report(4, "b is waited for")
    fleet.wait_for("s: b is waited for; alive, but not asking for a round: a.")
    fleet.members["a"].report(5, None)
    fleet.wait_for("Rounds go on: round 5")
    fleet.said.clear()
    fleet.wait_for("No round for")
    fleet.members["a"].ask({"round": 6}, IDLE_SECONDS)
    fleet.wait_for("Rounds go on: round 6")


def test_invalid_addresses():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"bind: 127.0.0.1:{port} cannot be listened at \(Address already"):
            serve(f"127.0.0.1:{port}", TOKEN, QUORUM)
    with pytest.raises(UserError, match=r"has to be HOST:PORT"):
        serve("127.0.0.1", TOKEN, QUORUM)
