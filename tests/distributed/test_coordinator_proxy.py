"""The way to JAX's coordinator: it carries, and stays open when the coordinator is gone."""

import socket
from contextlib import ExitStack

import pytest

from gregale.distributed.devices import start_proxy


def accepted(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(20)
    return connection


def says_nothing(client: socket.socket) -> bool:
    """Whether a connection is open, and nothing comes."""
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    return True


def test_connections_carry_both_ways_and_stay_open_when_the_coordinator_is_gone():
    """JAX ends its process as soon as the connection closes, and sends signs of life meanwhile."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, _, local = start_proxy(f"127.0.0.1:{coordinator.getsockname()[1]}").rpartition(":")
        accepted(coordinator).close()  # who looks whether it is there

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(local)), 20))

        short, short_end = connected(), accepted(coordinator)
        short.sendall(b"question")
        assert short_end.recv(100) == b"question"
        short_end.sendall(b"answer")
        assert short.recv(100) == b"answer"
        short.close()
        assert short_end.recv(100) == b""

        ours, theirs = connected(), accepted(coordinator)
        coordinator.close()
        theirs.close()
        for _ in range(2):
            ours.sendall(b"x" * 100_000)
            assert says_nothing(ours)
        assert all(says_nothing(each) for each in (connected(), connected(), ours)), "also ones that come then"
