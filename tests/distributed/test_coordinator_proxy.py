"""The way to JAX's coordinator: it carries, and stays open when the coordinator is gone."""

import socket

import pytest

from gregale.distributed.coordinator_proxy import start_proxy


@pytest.fixture
def coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def accepted(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(20)
    return connection


@pytest.fixture
def client(coordinator):
    """A client of JAX's, and the coordinator's end of its connection."""
    port = coordinator.getsockname()[1]
    host, _, local = start_proxy(f"127.0.0.1:{port}").rpartition(":")
    accepted(coordinator).close()  # who looks whether it is there
    with socket.create_connection((host, int(local)), 20) as client:
        yield client, accepted(coordinator)


def says_nothing(client: socket.socket) -> bool:
    """Whether a connection is open, and nothing comes."""
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)
    return True


def test_it_carries_both_ways_and_ends_with_the_client(client):
    ours, theirs = client
    ours.sendall(b"question")
    assert theirs.recv(100) == b"question"
    theirs.sendall(b"answer")
    assert ours.recv(100) == b"answer"
    ours.close()
    assert theirs.recv(100) == b""


def test_connections_stay_open_when_the_coordinator_is_gone_also_one_that_comes_then(client, coordinator):
    """JAX ends its process as soon as the connection closes, and sends signs of life meanwhile."""
    ours, theirs = client
    coordinator.close()
    theirs.close()
    for _ in range(2):
        ours.sendall(b"x" * 100_000)
        assert says_nothing(ours)
    others = [socket.create_connection(ours.getpeername(), 20) for _ in range(2)]
    try:
        assert all(says_nothing(one) for one in (*others, ours))
    finally:
        for one in others:
            one.close()
