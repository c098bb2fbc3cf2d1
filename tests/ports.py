"""Ports for servers that other processes start a while later, and the ports that a process listens at."""

import os
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


def listening(process: int | str = "self") -> set[tuple[str, int]]:
    """The addresses that a process listens at."""
    inodes = set()
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/{process}/fd/{name}"))
    found = set()
    with open(f"/proc/{process}/net/tcp", encoding="ascii") as table:
        for fields in (line.split() for line in list(table)[1:]):
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
