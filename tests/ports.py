"""Ports for servers that other processes start a while later."""

import secrets
import socket
from contextlib import suppress

FIRST, COUNT = 20_000, 12_000  # below those that the system gives to clients, and to who binds to any


def free_port(host: str = "") -> int:
    """A port of this host at which nobody listens, and which nobody gets by chance before it is listened at."""
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        with suppress(OSError), socket.socket() as listening:
            listening.bind((host, port))
            return port
