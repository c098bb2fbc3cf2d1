"""Host 0 of an island and its others: connections, and what the others are told in which order."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.islands.follower import Follower
from gregale.islands.host_connection import HostConnection, RemoteHost
from gregale.islands.host_group import HostGroup, joint_digest
from gregale.islands.host_worker import Count, NotFinite, OuterSnapshot, Timeouts
from gregale.islands.protocol.headers import Peer, seed
from gregale.islands.state_verification import DigestMismatch, FetchedState
from gregale.islands.trainer_command import (
    ApplyRound,
    CopyInnerState,
    Down,
    Finish,
    LoadOuterState,
    RoundPacing,
    SendMessage,
)
from gregale.islands.transport.group import GroupFailed
from gregale.islands.transport.server import Server
from gregale.islands.transport.transfer import TransferFailed
from gregale.methods.island_outer import OuterView
from gregale.methods.schedule import Schedule

PACE = RoundPacing(Schedule(4, 1, 0, 1), 10, False, 1.0)
PEERS = (Peer("a", "s", ("a:1", "a:2")), Peer("b", "s", ("b:1", "b:2")))
OF_ALL = joint_digest(["digest of 0", "digest of 1"])


class Recorded:
    """A worker whose outer side is the number of what was committed; `fails`: what the next reduces and heals raise."""

    def __init__(self, name: str):
        self.name, self.count, self.committed = name, Count(), 0
        self.timeouts = Timeouts(20.0, 20.0)
        self.log: list[tuple] = []
        self.fails: list[Exception | None] = []
        self.rounds = [7]
        self.digests: dict[str, str] = {}

    @property
    def side(self) -> OuterSnapshot:
        return OuterSnapshot(None, OuterView({}, {0: self.committed}, {}))

    def reduce(self, key, number, members, weights, name) -> str:
        self.log.append(("reduce", key, number, tuple(members), tuple(weights), name))
        self.count.sent += 5
        if self.fails and (error := self.fails.pop(0)):
            raise error
        return f"digest of {self.name}"

    def commit(self, key, outer) -> None:
        self.committed += 1

    def fetch(self, sources, settled) -> FetchedState:
        """Of the first source; `digests`: what a source's arrays have in place of what the record was made of."""
        self.log.append(("fetch", *(source.name for source in sources)))
        if self.fails and (error := self.fails.pop(0)):
            raise error
        number = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        digest = self.digests.get(sources[0].name, f"digest of {self.name}")
        return FetchedState(replace(seed(OF_ALL), round=number), digest, settled)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.log.append((name, *arguments))


@pytest.fixture
def island():
    """All hands of two hosts, their workers, and the follower."""
    workers: Any = Recorded("0"), Recorded("1")
    hands = HostGroup(workers[0], [RemoteHost(1)])
    workers[0].server = server = Server("127.0.0.1", b"a token", hands.heard)
    follower = Follower(workers[1], HostConnection(server.address, b"a token", 1), PACE)
    follower.start()
    yield hands, workers, follower
    hands.close()
    follower.close()
    server.close()


def test_the_others_are_told_the_same_in_the_same_order(island):
    hands, _, follower = island
    orders = [
        SendMessage(3),
        None,
        ApplyRound(3, 12.5),
        CopyInnerState(),
        LoadOuterState(9),
        LoadOuterState(10, inherits=True),
        Finish(complete=True),
    ]
    for order in orders:
        hands.ordered(order)
        hands.granted(None if order is None else len(order))
    assert [follower.order() for _ in orders] == orders
    assert [follower.take() for _ in orders] == [1, None, 3, 0, 2, 2, 1]


def test_an_order_comes_with_the_outer_side_of_its_place_in_the_stream(island):
    """A round that is committed while the other host's trainer is late does not change what it mixes in."""
    hands, _, follower = island
    for _ in range(3):
        hands.commit("key", seed("d"))
        hands.ordered(ApplyRound(0, 1.0))
    found = []
    for _ in range(3):
        follower.order()
        found.append(follower.side.moment.versions[0])
    assert found == [1, 2, 3]


def test_a_reduce_is_that_of_all_hosts(island):
    hands, (own, other), _ = island
    digest = hands.reduce("key", 4, PEERS, [1.0, 2.0], "a")
    assert digest == joint_digest(["digest of 0", "digest of 1"])
    assert own.log == other.log == [("reduce", "key", 4, PEERS, (1.0, 2.0), "a")]
    assert hands.count.sent == 10, "bytes of all hosts"


@pytest.mark.parametrize("error", [GroupFailed("cut"), NotFinite("nan")])
@pytest.mark.parametrize("number", [0, 1])
def test_a_reduce_that_fails_on_one_host_is_dropped_on_all(island, error, number):
    hands, workers, _ = island
    workers[number].fails = [error]
    with pytest.raises(type(error)):
        hands.reduce("key", 4, PEERS, [1.0, 2.0], "a")
    hands.reduce("next", 4, PEERS, [1.0, 2.0], "a")  # what was told before is done
    for worker in workers:
        done = [each[0] for each in worker.log]
        assert ("discard", "key") in worker.log
        assert done[-1] == "reduce"
        assert "drop_group" in done or isinstance(error, NotFinite)


def test_a_round_s_messages_are_there_when_all_hosts_have_theirs(island):
    hands, (own, other), follower = island
    waiting = Thread(target=lambda: hands.took(4, {"w|0": np.zeros(1)}))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    follower.message_sent(4, lambda: Down({}, 1.0, 1.0), 0)
    waiting.join(10)
    assert not waiting.is_alive()
    assert own.log[0][:2] == other.log[0][:2] == ("took", 4)


def test_hosts_fetch_again_until_they_have_the_same_round(island):
    hands, (own, other), _ = island
    own.rounds, other.rounds = [7, 9], [8, 9]
    assert hands.heal(PEERS, True).outer.round == 9
    own.rounds, other.rounds = [10], [11]
    with pytest.raises(TransferFailed, match=r"different states, of rounds \[10, 11\]"):
        hands.heal(PEERS, True)


def test_arrays_that_are_not_those_of_their_record_are_taken_from_another_source(island):
    """The digest of a record is of the arrays of all hosts: a host alone could not tell."""
    hands, (own, other), _ = island
    other.digests = {"a": "changed"}
    assert hands.heal(PEERS, True).outer.round == 7
    assert own.log == other.log == [("fetch", "a", "b"), ("fetch", "a"), ("fetch", "b")]
    other.digests["b"] = "changed too"
    with pytest.raises(TransferFailed, match="round 7 of b have the digest"):
        hands.heal(PEERS, True)


def test_a_record_that_is_garbage_on_one_host_is_another_sources(island):
    hands, (_, other), _ = island
    other.fails = [DigestMismatch("garbage"), None]
    assert hands.heal(PEERS, True).outer.round == 7


def test_what_host_0_says_comes_once_and_in_order_whatever_connections_break(island):
    hands, (own, _), follower = island
    for number in range(20):
        hands.granted(number)
        if number % 5 == 0:
            own.server._http.end_all()
    assert [follower.take() for _ in range(20)] == list(range(20))


def test_what_a_host_says_twice_counts_once():
    host = RemoteHost(1)
    answer = host.ask("reduce", [])
    assert host.heard({"have": 0})["told"] == host.heard({"have": 0})["told"] != []
    said = {"number": 0, "ask": 0, "value": "digest"}
    assert host.heard(said) == host.heard(said) == {}
    assert answer.result() == said


def test_a_host_that_does_not_reach_host_0_says_what_to_set():
    with pytest.raises(UserError, match=r"host 1 of this island cannot reach host 0 .*islands.bind of process 0"):
        HostConnection("127.0.0.1:9/0", b"a token", 1)
