"""A proxy in front of JAX's coordinator, which runs in process 0.

JAX's client aborts its process, with a stack of C++ frames, as soon as its connection to the coordinator closes. No
setting prevents it. So the other processes connect to a local port, and threads forward everything to the coordinator
and back. When process 0 ends, that port stays open, and `gregale.distributed.liveness` reports the lost process.
"""

import socket
import time
from contextlib import suppress
from threading import Thread

_RETRY_SECONDS = 0.2


def start_proxy(coordinator: str) -> str:
    """Wait for the coordinator (HOST:PORT), then return the address of a local port that forwards to it."""
    host, _, port = coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    while True:
        with suppress(OSError):
            socket.create_connection(address, timeout=10).close()
            break
        time.sleep(_RETRY_SECONDS)
    server = socket.create_server(("127.0.0.1", 0))
    Thread(target=_serve, args=(server, address), daemon=True, name="coordinator").start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _serve(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        Thread(target=_forward, args=(client, address), daemon=True).start()


def _forward(client: socket.socket, address: tuple[str, int]) -> None:
    """Forward a connection of JAX's client to the coordinator.

    The connection stays open until the client closes it, even if the coordinator cannot be reached. The client then
    waits until `gregale.distributed.liveness` has found the lost process.
    """
    with client:
        with suppress(OSError), socket.create_connection(address, timeout=10) as coordinator:
            coordinator.settimeout(None)
            for connection in (client, coordinator):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Thread(target=_copy, args=(coordinator, client), daemon=True).start()
            _copy(client, coordinator)
            coordinator.shutdown(socket.SHUT_RDWR)  # wakes the other thread
        with suppress(OSError):
            while client.recv(1 << 16):
                pass


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
