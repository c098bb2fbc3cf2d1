"""A peer that is cut off is noticed while a round waits for it."""

import socket
import threading

from gregale.islands.driver import PeerProbe, dead_peers
from gregale.islands.protocol.messages import Peer
from gregale.islands.transport.server import Endpoint, Server

TOKEN = b"a token of the fleet"


def test_a_peer_that_accepts_connections_but_is_silent_is_named_and_the_group_dropped():
    """As a stopped process does."""
    dropped = threading.Event()
    server = Server(Endpoint("127.0.0.1"), TOKEN, dict)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        peers = {"lives": server.address, "stopped": f"127.0.0.1:{stopped.getsockname()[1]}"}
        with PeerProbe(peers, TOKEN, 0.6, dropped.set) as probe:
            assert dropped.wait(10.0)
        assert probe.silent == ["stopped"]
        assert probe.reason() == "stopped did not answer"
    server.close()


def test_a_busy_server_that_closes_a_probe_is_asked_again(monkeypatch):
    """As one does with the oldest connections when too many come at once."""
    answered, dropped = threading.Event(), threading.Event()
    server = Server(Endpoint("127.0.0.1"), TOKEN, dict, status=lambda: {"answered": answered.set()})
    refused, process = [], server._http.process_request

    def busy(request, address) -> None:
        if len(refused) < 2:
            refused.append(request)
            server._http.shutdown_request(request)
        else:
            process(request, address)

    monkeypatch.setattr(server._http, "process_request", busy)
    with PeerProbe({"busy": server.address}, TOKEN, 4.0, dropped.set) as probe:
        assert answered.wait(10.0)
    assert len(refused) == 2
    assert not dropped.is_set()
    assert probe.silent == []
    server.close()


def test_only_a_refused_connection_means_dead():
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as other:
        silent, port = f"127.0.0.1:{stopped.getsockname()[1]}", other.getsockname()[1]
        peers = [Peer("stopped", "1", (silent,)), Peer("nowhere", "2", ("no.such.host.invalid:9",))]
        assert dead_peers(peers) == frozenset()
        other.close()
        assert dead_peers([*peers, Peer("killed", "3", (f"127.0.0.1:{port}",))]) == {"killed/3"}
