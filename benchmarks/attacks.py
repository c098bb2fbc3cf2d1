"""Attacks on every port of a fleet of real islands on loopback, while it makes rounds.

    python -m benchmarks.attacks                  # half a minute for each attack: a table, exit code 1 if a check fails

The attackers find the ports that the lighthouse and the islands listen at. They send garbage, keep 1,000 connections
that never finish a handshake, send byte by byte, send again all bytes that somebody between the islands has recorded,
and ask with another token. Nobody may learn bytes of the parameters or of the protocol.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults import write_inputs
from gregale.islands.transport.client import PeerClient, PeerUnreachable
from tests.fleet import Fleet, Seconds
from tests.ports import free_port, listening
from tests.recorder import Recorder

NAMES = ("a", "b", "c")
Address = tuple[str, int]
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a TLS handshake begins
PROTOCOL_WORDS = (b"HTTP/1", b"X-Recipient", b'"digest"', b'"manifest"', b"application")
WINDOW_BYTES, WINDOWS = 16, 300


class Attack:
    """The attackers' means; `learnt` has all bytes that a server sent to them."""

    def __init__(self, addresses: list[Address], recorders: list[Recorder]):
        self.addresses, self.connections, self.learnt = addresses, 0, bytearray()
        self.over = threading.Event()
        self._recorders = recorders

    def exchange(self, address: Address, content: bytes, seconds: float = 0.2) -> None:
        """Send bytes, and take the answer."""
        self.connections += 1
        with suppress(OSError), socket.create_connection(address, 5.0) as connection:
            connection.sendall(content)
            connection.settimeout(seconds)
            while answer := connection.recv(1 << 16):
                self.learnt += answer

    def garbage(self, address: Address) -> None:
        contents = [
            os.urandom(4096),
            b"POST /message HTTP/1.1\r\n\r\n",
            HELLO + os.urandom(508),
            b"\x17\x03\x03\xff\xff",
        ]
        while not self.over.is_set():
            self.exchange(address, random.choice(contents))

    def half_open(self, address: Address, count: int = 1000) -> None:
        """Keep `count` connections; open another for each that the server ends."""
        held: list[socket.socket] = []
        while not self.over.wait(0.001):
            self.connections += 1
            with suppress(OSError):
                held.append(socket.create_connection(address, 5.0))
                held[-1].sendall(HELLO[: len(held) % 8])
            if len(held) > count:
                held.pop(0).close()
        for connection in held:
            connection.close()

    def slow(self, address: Address) -> None:
        def send() -> None:
            while not self.over.is_set():
                self.connections += 1
                with suppress(OSError), socket.create_connection(address, 5.0) as connection:
                    for byte in HELLO + bytes(500):
                        connection.sendall(bytes([byte]))
                        if self.over.wait(0.05):
                            return

        in_threads([send] * 20)

    def replay(self, address: Address) -> None:
        """Send what was recorded of each connection until now, whole or its beginning."""
        while not self.over.wait(0.01):
            recorded = random.choice([each for recorder in self._recorders for each in list(recorder.recorded)])
            self.exchange(address, bytes(recorded[: random.choice([600, 1 << 20])]))

    def wrong_token(self, address: Address) -> None:
        while not self.over.wait(0.01):
            self.connections += 1
            with closing(PeerClient(f"{address[0]}:{address[1]}/x", os.urandom(8) + b"a wrong token", 5.0)) as client:
                try:
                    self.learnt += repr(client.request("GET", "/status")).encode()
                except PeerUnreachable:
                    continue
                raise AssertionError("a server has answered to another token")


class Row(NamedTuple):
    attack: str
    connections: int
    rounds: int
    tried_again: int
    stalls: int


def in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def said(fleet: Fleet, text: str) -> int:
    return sum(island.said().count(text) for island in fleet.islands.values())


def measured(name: str, fleet: Fleet, attack: Attack, seconds: float) -> Row:
    """Attack all ports at once for some seconds."""
    before, lines = fleet.newest(), [said(fleet, text) for text in ("is tried again", "No round for")]
    jobs = [(getattr(attack, name), address) for address in attack.addresses] if name != "none" else []
    attackers = [threading.Thread(target=job, args=(address,)) for job, address in jobs]
    for each in attackers:
        each.start()
    time.sleep(seconds)
    rounds = fleet.newest() - before
    attack.over.set()
    for each in attackers:
        each.join(30.0)
    again, stalls = (
        said(fleet, text) - count for text, count in zip(("is tried again", "No round for"), lines, strict=True)
    )
    return Row(name, attack.connections, rounds, again, stalls)


def leaks(fleet: Fleet, contents: list[bytes]) -> list[str]:
    """What of the parameters or the protocol is in these bytes."""
    files = [path for island in fleet.islands.values() for path in Path(str(island.run)).rglob("outer/**/*")]
    state = [path.read_bytes() for path in files if path.is_file() and path.stat().st_size > 10_000]
    assert state, "no outer state was saved"
    source, found = (
        random.Random(0),
        [word.decode() for word in PROTOCOL_WORDS if any(word in each for each in contents)],
    )
    for _ in range(WINDOWS):
        content = source.choice(state)
        start = source.randrange(len(content) - WINDOW_BYTES)
        window = content[start : start + WINDOW_BYTES]
        if len(set(window)) > WINDOW_BYTES // 2 and any(window in each for each in contents):
            found.append(f"bytes {start} of an outer state")
    return found


def attacked(options: argparse.Namespace, folder: Path) -> int:
    arguments = ("--islands.min_members_to_start", "3", "--islands.min_members", "3", "--checkpoint.every", "20")
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(folder, "fleet.yaml", Seconds(), arguments, True, pace=options.pace))
        recorders = []
        for name in NAMES:
            port = free_port("127.0.0.1")
            recorders.append(stack.enter_context(Recorder("127.0.0.1", port)))
            own = f"127.0.0.1:{port}"
            fleet.start(name, "--islands.bind", own, "--islands.address", recorders[-1].address)
        fleet.wait_for_members(NAMES, 300.0)
        fleet.wait(lambda: fleet.newest() >= 10, 300.0, "ten rounds")
        processes = [fleet.lighthouse, *(island.process for island in fleet.islands.values())]
        addresses = sorted(set().union(*(listening(process.pid) for process in processes)))
        print(f"The fleet listens at {len(addresses)} ports of {len(processes)} processes.", flush=True)
        rows, learnt = [], list[bytes]()
        for name in ("none", "garbage", "half_open", "slow", "replay", "wrong_token"):
            attack = Attack(addresses, recorders)
            rows.append(measured(name, fleet, attack, options.seconds))
            learnt.append(bytes(attack.learnt))
            print(rows[-1], flush=True)
        newest = fleet.newest()
        fleet.wait(lambda: all(fleet.newest(name) > newest for name in NAMES), 60.0, "a round after the attacks")
        same = fleet.check()
        missing = set(range(1, newest + 1)) - {each.round for each in fleet.observe()}
        on_the_way = [bytes(each) for recorder in recorders for each in recorder.recorded]
        found = leaks(fleet, [*learnt, *on_the_way])
        lives = all(island.lives for island in fleet.islands.values()) and fleet.lighthouse.poll() is None
    print("\n| attack | connections | rounds | reduces tried again | stalls |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.attack} | {row.connections:,} | {row.rounds} | {row.tried_again} | {row.stalls} |")
    recorded, answers = (sum(map(len, contents)) / 1e6 for contents in (on_the_way, learnt))
    print(f"\n{same} rounds are the same on all islands; rounds that are missing: {sorted(missing) or 'none'}.")
    print(f"{recorded:.1f} MB were recorded on the way, {answers:.2f} MB of answers: {found or 'nothing'} was learnt.")
    return int(bool(missing or found or not lives))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each attack")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step takes at least")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 20_000), most))
    folder = Path(tempfile.mkdtemp(prefix="attacks-"))
    write_inputs(folder)
    return attacked(options, folder)


if __name__ == "__main__":
    sys.exit(main())
