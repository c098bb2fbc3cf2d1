"""The way to JAX's coordinator, which runs in process 0.

JAX's client aborts its process, with a stack of C++ frames, as soon as its connection to the coordinator closes; no
setting prevents it. So the other processes connect to a port of their own, from which threads carry everything to the
coordinator and back. When process 0 is gone, that port stays open, and `gregale.services.peers` says what has happened.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread

_RETRY_SECONDS = 0.2


def way_to(coordinator: str) -> str:
    """The address of a local port that leads to the coordinator (HOST:PORT), as soon as that can be reached."""
    host, _, port = coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    while not _is_there(address):
        time.sleep(_RETRY_SECONDS)
    server = socket.create_server(("127.0.0.1", 0))
    Thread(target=_serve, args=(server, address), daemon=True, name="coordinator").start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _is_there(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=10).close()
    except OSError:
        return False
    return True


def _serve(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        try:
            coordinator = socket.create_connection(address, timeout=10)
        except OSError:
            continue  # `client` is kept open by nobody, so JAX tries again
        coordinator.settimeout(None)
        for pair in ((client, coordinator), (coordinator, client)):
            for one in pair:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Thread(target=_carry, args=(client, coordinator, True), daemon=True).start()
        Thread(target=_carry, args=(coordinator, client, False), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket, closes: bool) -> None:
    """Copies until the source ends; the sink then ends too, if it is the coordinator."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    if closes:
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
