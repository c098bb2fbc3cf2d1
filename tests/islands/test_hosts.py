"""Hosts of an island: commands, the inner optimizer that one of two hosts inherits, and states served and taken."""

from contextlib import ExitStack
from dataclasses import replace
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.islands.driver import newest
from gregale.islands.hosts import (
    DigestMismatch,
    FetchedState,
    Follower,
    HostConnection,
    HostGroup,
    HostWorker,
    NotFinite,
    OuterSnapshot,
    Recovery,
    RemoteHost,
    joint_digest,
)
from gregale.islands.outer import HostOuter, OuterView
from gregale.islands.protocol.messages import Generation, OuterRecord, Peer, Reduce, Timing, seed
from gregale.islands.state import InnerOptimizerState
from gregale.islands.trainer_command import (
    ApplyRound,
    CopyInnerState,
    DeviceToHostCopy,
    Finish,
    LoadOuterState,
    RoundPacing,
    SendMessage,
)
from gregale.islands.transport.group import Count, GroupFailed
from gregale.islands.transport.server import Endpoint, Server
from gregale.islands.transport.transfer import TransferFailed
from gregale.methods.schedule import Schedule
from gregale.training.state import initial_state
from tests.methods.islands import LAYERS, Net, on_one_device

TOKEN = b"a token of the fleet"
TIMING = Timing(reduce_seconds=20.0, heal_seconds=20.0)
PACE = RoundPacing(Schedule(4, 1, 0, 1), 10, False, 1.0)
PEERS = (Peer("a", "s", ("a:1", "a:2")), Peer("b", "s", ("b:1", "b:2")))
OF_ALL = joint_digest(["digest of 0", "digest of 1"])


class Recorded:
    """A worker whose outer side is the number of what was committed; `fails`: what the next reduces and heals raise."""

    def __init__(self, name: str):
        self.name, self.count, self.committed = name, Count(), 0
        self.timing = TIMING
        self.log: list[tuple] = []
        self.fails: list[Exception | None] = []
        self.rounds = [7]
        self.digests: dict[str, str] = {}

    @property
    def side(self) -> OuterSnapshot:
        return OuterSnapshot(None, OuterView({}, {0: self.committed}, {}))

    def reduce(self, action, name) -> str:
        self.log.append(("reduce", action, name))
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
    """All hosts of two hosts, their workers, and the follower."""
    workers: Any = Recorded("0"), Recorded("1")
    hosts = HostGroup(workers[0], [RemoteHost(1)])
    workers[0].server = server = Server(Endpoint("127.0.0.1"), TOKEN, hosts.handle)
    follower = Follower(workers[1], HostConnection(server.address, TOKEN, 1), PACE)
    follower.start()
    yield hosts, workers, follower
    hosts.close()
    follower.close()
    server.close()


def test_all_hosts_receive_the_same_commands_in_the_same_order(island):
    hosts, _, follower = island
    orders = [SendMessage(3), None, ApplyRound(3, 12.5), CopyInnerState(), LoadOuterState(9)]
    orders += [LoadOuterState(10, inherits=True), Finish(complete=True)]
    for order in orders:
        hosts.ordered(order)
        hosts.granted(None if order is None else len(order))
    assert [follower.order() for _ in orders] == orders
    assert [follower.take() for _ in orders] == [1, None, 3, 0, 3, 3, 1]


def test_a_command_has_the_outer_state_of_its_position_in_the_stream(island):
    """A round that is committed while the other host's trainer is late does not change what it mixes in."""
    hosts, _, follower = island
    for _ in range(3):
        hosts.commit("key", seed("d"))
        hosts.ordered(ApplyRound(0, 1.0))
    found = []
    for _ in range(3):
        follower.order()
        found.append(follower.side.moment.versions[0])
    assert found == [1, 2, 3]


def test_a_reduce_covers_all_hosts(island):
    hosts, (own, other), _ = island
    action = Reduce("key", 4, PEERS, (1.0, 2.0), (3, 1))
    digest = hosts.reduce(action, "a")
    assert digest == OF_ALL
    assert own.log == other.log == [("reduce", action, "a")]
    assert hosts.count.sent == 10, "bytes of all hosts"


@pytest.mark.parametrize("error", [GroupFailed("cut"), NotFinite("nan")])
@pytest.mark.parametrize("number", [0, 1])
def test_a_reduce_that_fails_on_one_host_is_dropped_on_all(island, error, number):
    hosts, workers, _ = island
    workers[number].fails = [error]
    with pytest.raises(type(error)):
        hosts.reduce(Reduce("key", 4, PEERS, (1.0, 2.0)), "a")
    hosts.reduce(Reduce("next", 4, PEERS, (1.0, 2.0)), "a")  # what was told before is done
    for worker in workers:
        done = [each[0] for each in worker.log]
        assert ("discard", "key") in worker.log
        assert done[-1] == "reduce"
        assert "drop_group" in done or isinstance(error, NotFinite)


def test_a_round_without_a_message_does_not_wait_until_the_device_has_computed_it(island):
    hosts, (_, other), follower = island
    computed = Event()
    late = Timer(5.0, computed.set)

    def fetch_down() -> DeviceToHostCopy:
        computed.wait()
        return DeviceToHostCopy({}, 1.0, 1.0)

    late.start()
    follower.message_sent(5, fetch_down, 0)
    hosts.reduce(Reduce("key", 4, PEERS, (1.0, 0.0)), "b")
    done = [each[0] for each in other.log]
    computed.set()
    late.cancel()
    assert done == ["reduce"]


def test_messages_are_stored_when_all_hosts_have_theirs(island):
    hosts, (own, other), follower = island
    waiting = Thread(target=lambda: hosts.store_messages(4, {"w|0": np.zeros(1)}))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    follower.message_sent(4, lambda: DeviceToHostCopy({}, 1.0, 1.0), 0)
    waiting.join(10)
    assert not waiting.is_alive()
    assert own.log[0][:2] == other.log[0][:2] == ("store_messages", 4)


def test_hosts_fetch_again_until_they_have_the_same_round(island):
    hosts, (own, other), _ = island
    own.rounds, other.rounds = [7, 9], [8, 9]
    assert hosts.heal(PEERS, True).outer.round == 9
    own.rounds, other.rounds = [10], [11]
    with pytest.raises(TransferFailed, match=r"different states, of rounds \[10, 11\]"):
        hosts.heal(PEERS, True)


def test_arrays_that_do_not_match_their_record_are_fetched_from_another_source(island):
    """The digest of a record is of the arrays of all hosts: a host alone could not tell."""
    hosts, (own, other), _ = island
    other.digests = {"a": "changed"}
    assert hosts.heal(PEERS, True).outer.round == 7
    assert own.log == other.log == [("fetch", "a", "b"), ("fetch", "a"), ("fetch", "b")]
    other.fails = [DigestMismatch("an invalid record"), None]
    assert hosts.heal(PEERS, True).outer.round == 7
    other.digests["b"] = "changed too"
    with pytest.raises(TransferFailed, match="round 7 of b have the digest"):
        hosts.heal(PEERS, True)


def test_commands_arrive_once_and_in_order_despite_broken_connections(island):
    hosts, (own, _), follower = island
    for number in range(20):
        hosts.granted(number)
        if number % 5 == 0:
            own.server._http.end_all()
    assert [follower.take() for _ in range(20)] == list(range(20))


def test_a_repeated_answer_counts_once():
    host = RemoteHost(1)
    answer = host.request("reduce", [])
    assert host.handle({"have": 0})["told"] == host.handle({"have": 0})["told"] != []
    said = {"number": 0, "ask": 0, "value": "digest"}
    assert host.handle(said) == host.handle(said) == {}
    assert answer.result() == said


def test_a_host_that_cannot_reach_host_0_names_the_setting():
    with pytest.raises(UserError, match=r"host 1 of this island cannot reach host 0 .*islands.bind of process 0"):
        HostConnection("127.0.0.1:9/0", TOKEN, 1)


class Island:
    """Two hosts without an outer side, whose trainers are after so many `steps`."""

    def __init__(self, stack: ExitStack, steps: tuple[int, int] = (5, 5)):
        self.steps = steps
        self.workers = [self._worker(host) for host in (0, 1)]
        self.hands = HostGroup(self.workers[0], [RemoteHost(1)], wants_inner=True)
        link = HostConnection(self.workers[0].server.address, TOKEN, 1)
        self.follower = Follower(self.workers[1], link, PACE)
        self.follower.start()
        stack.callback(self.follower.close)
        stack.callback(self.hands.close)

    def _worker(self, host: int) -> HostWorker:
        server = Server(Endpoint("127.0.0.1"), TOKEN, self._shown)
        expected = {name: (array.shape, array.dtype) for name, array in optimizer(host, 0).arrays.items()}
        outer: Any = SimpleNamespace(now=lambda: None)  # nobody asks it for anything else
        return HostWorker(outer, PACE.schedule, server, TOKEN, TIMING, host, expected)

    def _shown(self, message: dict) -> dict:
        """What a driver does with this message, and its trainers."""
        if message["kind"] == "host":
            return self.hands.handle(message)
        assert message == {"kind": "inner"}
        self.hands.ordered(CopyInnerState())
        self.hands.show(optimizer(0, self.steps[0]))
        assert self.follower.order() == CopyInnerState()
        self.follower.shown(optimizer(1, self.steps[1]))
        self.hands.await_copies(self.steps[0])
        return {}

    def peer(self) -> Peer:
        return Peer("peer", "session", tuple(worker.server.address for worker in self.workers))

    def inherited(self) -> list[InnerOptimizerState | None]:
        """What the trainers get with the state that is installed now."""
        order = LoadOuterState(3, self.hands.takes_inner())
        self.hands.ordered(order)
        assert self.follower.order() == order
        return [take() if order.inherits else None for take in (self.hands.inherited, self.follower.inherited)]


def optimizer(host: int, step: int) -> InnerOptimizerState:
    """A host's shards after so many steps."""
    moments = np.full((3, 2), 10 * step + host, np.float32)
    return InnerOptimizerState(step, {f"inner/mu|{host}": moments, "inner/count|": np.array(step)})


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda *steps: Island(stack, *steps)


def same(found: InnerOptimizerState | None, expected: InnerOptimizerState) -> None:
    assert found is not None
    assert found.step == expected.step
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def test_each_host_gets_the_shards_of_its_counterpart_if_all_hosts_can_fetch_theirs(make):
    peer, joiner, odd = make(), make(), make()
    odd.workers[1].inner["inner/nu|1"] = (2,), np.dtype(np.float32)
    odd.hands.inherit([peer.peer()])
    assert odd.inherited() == [None, None]
    joiner.hands.inherit([peer.peer()])
    own, other = joiner.inherited()
    same(own, optimizer(0, 5))
    same(other, optimizer(1, 5))
    assert not joiner.hands.wants_inner, "it has an optimizer of its own now"
    assert joiner.inherited() == [None, None]


def test_copies_of_different_steps_are_rejected_and_another_source_replaces_a_failing_one(make):
    """Moments of one step with those of another would be an optimizer that nobody has trained."""
    torn, lost, whole, joiner = make((5, 6)), make(), make((8, 8)), make()
    joiner.hands.inherit([torn.peer()])
    assert joiner.inherited() == [None, None]
    assert joiner.hands.wants_inner, "it may get one when it heals again"
    lost.workers[0].server.close()
    joiner.hands.inherit([each.peer() for each in (torn, lost, whole)])
    same(joiner.inherited()[1], optimizer(1, 8))


def test_a_diverged_island_inherits_once_until_it_contributes_again(make):
    peer, diverged, restarts = make(), make(), []
    recovery = Recovery(diverged.hands, restarts.append, lambda work: work())
    assert not recovery.is_tried
    recovery.begin([peer.peer()])
    assert recovery.is_tried
    assert restarts == [False, True]
    same(diverged.hands.inherited(), optimizer(0, 5))
    assert not diverged.hands.wants_inner
    recovery.begin([peer.peer()])
    assert restarts == [False, True, False]
    recovery.contributed()
    assert not recovery.is_tried
    recovery.begin([])  # nobody else made the round
    recovery.begin([peer.peer()])
    assert restarts == [False, True, False, False, False, True]


SCHEDULE = Schedule(4, 2, 1, LAYERS)


@pytest.fixture
def make_host():
    """Makes a host that holds the common seed."""
    made = []

    def one() -> HostWorker:
        outer = HostOuter(on_one_device(SCHEDULE))
        outer.begin(initial_state(outer.island, Net.init).method.psdp.parameters)
        server = Server(Endpoint("127.0.0.1"), TOKEN, dict)
        made.append(HostWorker(outer, SCHEDULE, server, TOKEN, TIMING))
        return made[-1]

    yield one
    for worker in made:
        worker.close()


def at_round(worker: HostWorker, number: int, change: float = 0.0) -> OuterRecord:
    """A host that serves the state of a round; returns its record. `change`: of one value, after it was recorded."""
    arrays = {name: held.array + number for name, held in worker.outer.leaves().items()}
    worker.outer.load(arrays, dict.fromkeys(arrays, number))
    record = replace(seed(worker.outer.digest), round=number, generation=Generation(1, "line"))
    next(iter(arrays.values())).reshape(-1)[0] += change
    worker.publish(record)
    return record


def peer(worker: HostWorker, name: str) -> Peer:
    return Peer(name, "session", (worker.server.address,))


def test_a_state_changed_after_its_commit_or_with_an_invalid_record_is_fetched_from_another_source(make_host):
    """Its pieces have the right hashes, as a source makes them of what it has; and here it has the majority."""
    joiner, sound, spoilt, other, odd = (make_host() for _ in range(5))
    record = at_round(sound, 3)
    assert at_round(spoilt, 3, change=1.0) == at_round(other, 3, change=1.0) == record
    at_round(odd, 4)
    odd.server.outer.publish(replace(odd.server.outer._snapshot, facts={"outer": "garbage"}))
    sources = [peer(spoilt, "spoilt"), peer(odd, "odd"), peer(other, "other"), peer(sound, "sound")]
    before = joiner.outer.digest
    hosts = HostGroup(joiner)
    with pytest.raises(TransferFailed, match=r"round 3 of spoilt have the digest .*, their record has"):
        hosts.heal(sources[:1], settled=False)
    assert hosts.heal(sources, settled=False).outer == record
    assert joiner.outer.digest == before, "nothing is taken over before `install`"
    hosts.install(record)
    assert joiner.outer.digest == record.digest == sound.outer.digest


@pytest.mark.parametrize(
    ("found", "seconds", "round"),
    [
        ([(3, True), (3, True)], 60.0, 3),
        ([(3, False), (4, True)], 60.0, 4),
        ([(3, True), (4, False), (5, False), (5, True)], 60.0, 5),
        ([(3, False), (3, False)], 0.0, 3),  # a round that does not end is not waited for for ever
    ],
)
def test_a_joiner_fetches_a_state_that_no_round_is_about_to_replace(found, seconds, round):
    asked, comes = [], iter(found)

    def heal(settled: bool) -> FetchedState:
        asked.append(settled)
        number, is_settled = next(comes)
        return FetchedState(replace(seed("d"), round=number), "d", is_settled)

    assert newest(heal, False, seconds).round == round
    assert asked == [False, *(len(found) - 1) * [True]]
