"""Real servers on loopback; time limits are far above what anything here takes."""

import socket
from collections.abc import Callable, Iterator

import pytest

from gregale.islands.transport.server import Endpoint, Server

TOKEN = b"a token of the fleet"
WAIT_SECONDS = 20.0


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """`make_server(on_message=..., ...)`: a server that ends with the test; its complaints are in `complaints`."""
    servers = []

    def make(token: bytes = TOKEN, bind: str = "127.0.0.1", **options) -> Server:
        lines: list[str] = []
        named = {name: options.pop(name) for name in ("address", "name", "recipient") if name in options}
        endpoint = Endpoint(bind, **named)
        server = Server(endpoint, token, complain=lines.append, **{"on_message": dict, **options})
        server.complaints = lines  # type: ignore[attr-defined]
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def received(connection: socket.socket) -> bytes:
    """Return all that a server sends until it closes a connection."""
    try:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except ConnectionResetError:  # it closed before it had read everything
        return b""
