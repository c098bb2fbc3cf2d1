"""Real servers on loopback; time limits are far above what anything here takes."""

import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from gregale.islands.transport.server import Server

TOKEN = b"a token of the fleet"


@pytest.fixture(autouse=True)
def the_extra() -> None:
    """Skip without PyTorch."""
    if find_spec("torch") is None:
        pytest.skip("needs the extra `islands`")


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """`make_server(on_message=..., ...)`: a server that ends with the test; its complaints are in `complaints`."""
    servers = []

    def make(token: bytes = TOKEN, bind: str = "127.0.0.1", **options) -> Server:
        lines: list[str] = []
        server = Server(bind, token, complain=lines.append, **{"on_message": dict, **options})
        server.complaints = lines  # type: ignore[attr-defined]
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def exchange(address: str, content: bytes) -> bytes:
    """Return all that a server answers to these bytes."""
    host, _, port = address.partition("/")[0].partition(":")
    with socket.create_connection((host, int(port)), 20.0) as connection:
        connection.sendall(content)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
