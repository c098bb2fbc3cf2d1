"""The rendezvous of a group's sockets: a PyTorch store over the authenticated servers."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gregale.islands.transport.client import PeerUnreachable, RequestRejected, call
from gregale.islands.transport.server import Server

RETRY_SECONDS = 0.1
JOIN_SECONDS = 0.05  # between two checks whether the group was cancelled


def make_gloo_store(
    distributed: Any, server: Server, group: str, hosts: Mapping[str, str], timeout_seconds: float
) -> Any:
    """Return a `torch.distributed.Store`: `set` sends a value to every peer's mailbox, `get` reads the own mailbox.

    `fault` names the peer that could not be reached, or has sent no value.

    - `hosts`: the addresses of all members by name, in the order of ranks
    """
    names, peers = list(hosts), {name: host for name, host in hosts.items() if host != server.address}
    deadline = time.monotonic() + timeout_seconds

    class GlooStore(distributed.Store):
        fault = ""

        def set(self, key: str, value: bytes) -> None:
            server.mailbox.put(group, key, bytes(value))
            message = {"group": group, "key": key, "value": bytes(value).hex()}
            threads = [threading.Thread(target=self._send, args=(name, message), daemon=True) for name in peers]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not server.mailbox.is_cancelled(group):
                threads[0].join(JOIN_SECONDS)
                threads = [thread for thread in threads if thread.is_alive()]
            if server.mailbox.is_cancelled(group):
                self.fault = "it was cancelled"
            if self.fault:
                raise RuntimeError(self.fault)

        def get(self, key: str) -> bytes:
            value = server.mailbox.get(group, key, max(deadline - time.monotonic(), 0.0))
            if value is None and server.mailbox.is_cancelled(group):
                self.fault = "it was cancelled"
                raise RuntimeError(self.fault)
            if value is None:
                self.fault = f"{names[int(key.rpartition('/')[2])]} did not come within {timeout_seconds:g} s"
                raise RuntimeError(self.fault)
            return value

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            for key in keys:
                self.get(key)

        def _send(self, name: str, message: dict) -> None:
            peer = peers[name]
            while True:
                try:
                    call(peer, server.token, message, max(deadline - time.monotonic(), RETRY_SECONDS), "/store")
                    return
                except (PeerUnreachable, RequestRejected) as error:
                    if time.monotonic() >= deadline or server.mailbox.is_cancelled(group):
                        self.fault = str(error) if name == peer else f"{name}: {error}"
                        return
                time.sleep(RETRY_SECONDS)

    return GlooStore()
