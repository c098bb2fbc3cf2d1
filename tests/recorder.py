"""Somebody on the way between two processes: passes all bytes on, and keeps them."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from gregale.islands.transport.tls import shut


class Recorder:
    """A port that passes all bytes on to `host:port`, and back.

    - `address`: its own
    - `recorded`: the bytes of both directions, for each direction of each connection
    """

    def __init__(self, host: str, port: int):
        self.recorded: list[bytearray] = []
        self._server, self._sockets = (host, port), [socket.create_server(("127.0.0.1", 0))]
        self.address = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            shut(each)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._sockets[0].accept()
                try:
                    far = socket.create_connection(self._server)
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        recorded = bytearray()
        self.recorded.append(recorded)
        with suppress(OSError):
            while content := source.recv(1 << 16):
                recorded += content
                target.sendall(content)
        shut(target)
