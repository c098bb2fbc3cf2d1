"""The watch of other processes, as far as it shows in one."""

from __future__ import annotations

import socket
import time

from gregale.services.distributed import DistributedConfig
from gregale.services.peers import Peer, Watch, watched
from gregale.services.progress import Doing, Place


def test_who_waited_for_long_in_the_roll_call_is_not_lost_when_the_watch_begins():
    """It was silent then, as it had to be."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours, "process 1", heard=time.monotonic() - 1000)
        Watch([peer], DistributedConfig("here:1", 2, 0, timeout_seconds=60))
        assert time.monotonic() - peer.heard < 30


def test_places_travel_with_the_signs_of_life_and_all_leave_together():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sides = [
            Watch([Peer(connection, f"process {1 - process}", 0.0)], DistributedConfig("here:1", 2, process, 60, 1.2))
            for process, connection in enumerate((ours, theirs))
        ]
        for side in sides:
            side.start()
        sides[1].progress.at(7, Doing.TRAINING)
        seen = sides[0]._peers[0]
        until = time.monotonic() + 20
        while seen.place != Place(7, Doing.TRAINING, False, 1) and time.monotonic() < until:
            time.sleep(0.01)
        assert seen.place.steps == 7
        sides[1]._may_leave = True
        sides[0].leave()
        sides[1].join(20)
        assert not sides[1].is_alive()


def test_without_others_nothing_is_watched():
    with watched(None, str) as progress:
        progress.at(1, Doing.TRAINING)
    assert progress.place.steps == 1
