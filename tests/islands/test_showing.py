"""An island of two hosts inherits another's inner optimizer over real servers, each host its shards, or nothing."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from gregale.islands.follower import Follower
from gregale.islands.host_connection import HostConnection, RemoteHost
from gregale.islands.host_group import HostGroup, Recovery
from gregale.islands.host_worker import HostWorker, Timeouts
from gregale.islands.inner_optimizer_state import InnerOptimizerState
from gregale.islands.protocol.headers import Peer
from gregale.islands.trainer_command import CopyInnerState, LoadOuterState, RoundPacing
from gregale.islands.transport.server import Server
from gregale.methods.schedule import Schedule

TOKEN = b"a token of the fleet"
SCHEDULE = Schedule(4, 1, 0, 1)
PACE = RoundPacing(SCHEDULE, 10, False, 1.0)


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
        server = Server("127.0.0.1", TOKEN, self._shown)
        expected = {name: (array.shape, array.dtype) for name, array in optimizer(host, 0).arrays.items()}
        outer: Any = Unused()
        return HostWorker(outer, SCHEDULE, server, TOKEN, Timeouts(20.0, 20.0), host, expected)

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


class Unused:
    """An outer side that nobody asks for anything."""

    def now(self) -> None:
        return None


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


def test_each_host_gets_the_shards_of_its_counterpart(make):
    peer, joiner = make(), make()
    joiner.hands.inherit([peer.peer()])
    own, other = joiner.inherited()
    same(own, optimizer(0, 5))
    same(other, optimizer(1, 5))
    assert not joiner.hands.wants_inner, "it has an optimizer of its own now"
    assert joiner.inherited() == [None, None]


def test_copies_of_different_steps_are_rejected(make):
    """Moments of one step with those of another would be an optimizer that nobody has trained."""
    torn, joiner = make((5, 6)), make()
    joiner.hands.inherit([torn.peer()])
    assert joiner.inherited() == [None, None]
    assert joiner.hands.wants_inner, "it may get one when it heals again"


def test_another_source_replaces_a_failing_one(make):
    torn, lost, whole, joiner = make((5, 6)), make(), make((8, 8)), make()
    lost.workers[0].server.close()
    joiner.hands.inherit([each.peer() for each in (torn, lost, whole)])
    same(joiner.inherited()[1], optimizer(1, 8))


def test_no_host_uses_a_copy_that_one_host_cannot_fetch(make):
    peer, joiner = make(), make()
    joiner.workers[1].inner["inner/nu|1"] = (2,), np.dtype(np.float32)
    joiner.hands.inherit([peer.peer()])
    assert joiner.inherited() == [None, None]


def test_a_diverged_island_inherits_once_until_it_contributes_again(make):
    peer, diverged, restarts = make(), make(), []
    recovery = Recovery(diverged.hands, restarts.append, lambda work: work())
    recovery.begin([peer.peer()])
    assert restarts == [False, True]
    same(diverged.hands.inherited(), optimizer(0, 5))
    assert not diverged.hands.wants_inner
    recovery.begin([peer.peer()])
    assert restarts == [False, True, False]
    recovery.contributed()
    recovery.begin([])  # nobody else made the round
    recovery.begin([peer.peer()])
    assert restarts == [False, True, False, False, False, True]
