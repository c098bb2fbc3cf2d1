"""A peer that is cut off is noticed while a round waits for it."""

from __future__ import annotations

import socket
import threading

from gregale.islands.peer_probe import PeerProbe, dead_peers
from gregale.islands.protocol.headers import Peer
from gregale.islands.transport.mailbox import Mailbox
from gregale.islands.transport.server import Server

TOKEN = b"a token of the fleet"


def test_a_peer_that_accepts_connections_but_is_silent_is_named_and_the_group_dropped():
    """As a stopped process does."""
    dropped = threading.Event()
    server = Server("127.0.0.1", TOKEN, dict)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        peers = {"lives": server.address, "stopped": f"127.0.0.1:{stopped.getsockname()[1]}"}
        watch = PeerProbe(peers, TOKEN, 1.0, dropped.set)
        with watch:
            assert dropped.wait(10.0)
        assert watch.silent == ["stopped"]
        assert watch.reason() == "stopped did not answer"
    server.close()


def test_a_short_round_sends_no_probe():
    watch = PeerProbe({"nobody": "127.0.0.1:9"}, TOKEN, 0.2, lambda: None)
    with watch:
        pass
    assert watch.silent == []


def test_a_cancelled_group_ends_its_waits():
    mailbox, found = Mailbox(), []
    waiting = threading.Thread(target=lambda: found.append(mailbox.get("group", "key", 60.0)))
    waiting.start()
    mailbox.cancel("group")
    waiting.join(10.0)
    assert found == [None]
    assert mailbox.is_cancelled("group")
    mailbox.forget("group")
    assert not mailbox.is_cancelled("group")


def test_only_a_refused_connection_means_dead():
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as other:
        silent = f"127.0.0.1:{stopped.getsockname()[1]}"
        port = other.getsockname()[1]
        peers = [Peer("stopped", "1", (silent,)), Peer("nowhere", "2", ("no.such.host.invalid:9",))]
        assert dead_peers(peers) == frozenset()
        other.close()
        assert dead_peers([*peers, Peer("killed", "3", (f"127.0.0.1:{port}",))]) == {"killed/3"}
