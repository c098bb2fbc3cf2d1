"""The watch of other processes, as far as it shows in one."""

import re
import socket
import time
from threading import Thread

import pytest

from gregale.distributed.config import DistributedConfig
from gregale.distributed.liveness import LivenessMonitor, Peer, Phase, ThreadProgress
from tests.waiting import until


def test_a_peer_that_was_silent_during_the_rendezvous_is_not_lost_when_the_monitor_starts():
    """It was silent then, as it had to be."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours, "process 1", last_heartbeat=time.monotonic() - 1000)
        LivenessMonitor([peer], DistributedConfig("here:1", 2, 0, timeout_seconds=60))
        assert time.monotonic() - peer.last_heartbeat < 30


def test_places_travel_with_the_signs_of_life_and_all_leave_together():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sides = [
            LivenessMonitor(
                [Peer(connection, f"process {1 - process}", 0.0)], DistributedConfig("here:1", 2, process, 60, 1.2)
            )
            for process, connection in enumerate((ours, theirs))
        ]
        for side in sides:
            side.start()
        sides[1].progress.at(7, Phase.TRAINING)
        until(lambda: sides[0]._peers[0].progress == ThreadProgress(7, Phase.TRAINING, False, 1))
        sides[1]._may_leave = True
        sides[0].leave()
        sides[1].join(20)
        assert not sides[1].is_alive()


class Telling(LivenessMonitor):
    """Tells why it would have ended this process."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.why: list[str] = []

    def _end(self, code: int, text: str, of: Peer | None = None) -> None:
        self.why.append(text)


@pytest.fixture
def three():
    """The watches of three processes, joined as in a run."""
    pairs = [socket.socketpair() for _ in range(2)]
    firsts = [Peer(ours, f"process {number}", 0.0) for number, (ours, _) in enumerate(pairs, 1)]
    config = [DistributedConfig("here:1", 3, number, 60) for number in range(3)]
    watches = [Telling(firsts, config[0])]
    watches += [Telling([Peer(theirs, "process 0", 0.0)], config[n]) for n, (_, theirs) in enumerate(pairs, 1)]
    yield watches
    for watch in watches:
        watch._may_leave = True
        for peer in watch._peers:
            peer.is_done = True
    for pair in pairs:
        for one in pair:
            one.close()


def asking(watch: LivenessMonitor) -> Thread:
    """A process that asks whether all others live, after an error."""
    thread = Thread(target=watch.confirm_peers_alive, daemon=True)
    thread.start()
    return thread


def test_a_silent_process_is_lost():
    ours, theirs = socket.socketpair()
    watch = Telling([Peer(ours, "process 0", 0.0)], DistributedConfig("here:1", 2, 1, timeout_seconds=1))
    with ours, theirs:
        watch.start()
        until(lambda: watch.why != [])
        watch._may_leave = watch._peers[0].is_done = True
        watch.join(20)
    assert watch.why[0] == "process 0 was lost: no heartbeat for 1 s."


def test_one_whose_main_thread_hangs_is_named_although_its_heartbeats_go_on(three):
    three[0]._hang_seconds = 1
    for number, watch in enumerate(three):
        watch._interval = 0.1
        watch.progress.at(6 if number == 1 else 7, Phase.TRAINING)
        watch.start()
    three[0].progress.current = three[2].progress.current = ThreadProgress(7, Phase.TRAINING, True, 2)
    until(lambda: three[0].why != [])
    limit = r"Limit: 1 s per step, ten times that for other work \(distributed\.hang_seconds\)\."
    assert re.fullmatch(rf"process 1 hangs: it has been for \d s in step 6\. {limit}", three[0].why[0])


def test_signs_of_life_that_a_dead_process_left_unread_are_no_answer(three):
    """Process 2 is dead, and what it said lies there: process 1, whose error this is, must not take it for alive."""
    three[2]._peers[0].connection.sendall(b"alive 3 training 0 1\n" * 10)
    for watch in three[:2]:
        watch.start()
    waits = asking(three[1])
    until(lambda: any(three[0]._peers[1] in each for each in three[0]._unanswered.values()))  # process 0 asks it
    time.sleep(0.6)
    assert waits.is_alive()
    three[2]._peers[0].connection.close()
    until(lambda: three[0].why != [])  # it is lost, and all end
    assert three[0].why == ["process 2 was lost: its connection closed."]
    assert waits.is_alive(), "it never was told that all live"


def test_the_error_of_a_process_whose_peer_has_ended_with_one_is_not_its_own(three):
    for watch in three:
        watch.start()
    three[2]._has_failed = True
    assert three[2]._failure_sent.wait(20)
    waits = asking(three[1])
    waits.join(1)
    assert waits.is_alive(), "it waits for process 0, which ends it after `distributed.timeout_seconds`"


def test_an_error_that_reaches_all_is_everybody_s_own(three):
    for watch in three:
        watch.start()
    for thread in [asking(watch) for watch in three]:
        thread.join(20)
        assert not thread.is_alive()
    assert all(watch._peers_confirmed.is_set() for watch in three)


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_did_not_run_for_a_while_hears_before_it_judges(ends):
    """As on a starved machine: it must not take its own absence for the silence of another."""
    ours, theirs = socket.socketpair()
    watch = Telling([Peer(ours, "process 0", 0.0)], DistributedConfig("here:1", 2, 1, timeout_seconds=1))

    class Stalls:
        times = 0

        @property
        def current(self):
            self.times += 1
            if self.times > 2 and ends:
                return ThreadProgress()
            theirs.sendall(b"alive 3 training 0 1\n")
            if self.times == 2:
                watch._peers[0].last_heartbeat = time.monotonic()
                if ends:
                    theirs.close()
                time.sleep(1.5)
            return ThreadProgress()

    watch.progress = Stalls()
    with ours, theirs:
        watch.start()
        until(lambda: watch.why != [] or watch.progress.times > 3)
        found = watch.why[:1]
        watch._may_leave = watch._peers[0].is_done = True
        watch.join(20)
    assert found == (["process 0 was lost: its connection closed."] if ends else [])
