"""Bytes a second that the members of a group send to each other, and the processor time of a byte.

    python -m benchmarks.streams                                    # two members on loopback
    python -m benchmarks.streams --members 3 --bandwidth 1gbit      # in network namespaces, as root

Every member sends as many bytes to each other member as it receives from it, at the same time, in messages of 4 MB, as
a reduce does. The processor time is that of a member for each byte that it sends or receives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext

import numpy as np

from gregale.islands.transport.group import Group
from gregale.islands.transport.server import Endpoint, Server
from tests.namespaces import Site, rate_limited

TOKEN, MESSAGE_BYTES, AHEAD, SECONDS = b"a benchmark's token", 4 << 20, 2, 600.0


def member(host: str, rank: int, megabytes: int, times: int) -> None:
    """A member; prints its address, takes all addresses as a line, prints what it measured."""
    server = Server(Endpoint(host), TOKEN, dict)
    print(server.address, flush=True)
    hosts = json.loads(input())
    group = Group("key", rank, hosts, server)
    began = time.monotonic()
    group.connect(SECONDS)
    connected = time.monotonic() - began
    peers = [peer for peer in range(len(hosts)) if peer != rank]
    message = np.random.default_rng(rank).integers(0, 256, MESSAGE_BYTES, np.uint8)
    count = max(megabytes * 10**6 // MESSAGE_BYTES // len(peers), 1)
    seconds, processor = [], []
    for _ in range(times):
        began, used = time.monotonic(), time.process_time()
        under_way = []
        for number in range(count):
            under_way.append([group.recv(peer, np.empty_like(message), number) for peer in peers])
            under_way[-1] += [group.send(peer, message, number) for peer in peers]
            for work in under_way.pop(0) if len(under_way) > AHEAD else []:
                work.wait(SECONDS)
        for work in (work for works in under_way for work in works):
            work.wait(SECONDS)
        seconds.append(time.monotonic() - began)
        processor.append(time.process_time() - used)
    sent = count * len(peers) * MESSAGE_BYTES
    print(json.dumps([sent / min(seconds), min(processor) / (2 * sent), connected]), flush=True)
    input()  # the others may still read
    os._exit(0)


def measure(sites: list[Site], options: argparse.Namespace) -> list[list[float]]:
    """Return by member: bytes a second in each direction, processor seconds a byte, seconds to connect."""
    members = []
    for rank, site in enumerate(sites):
        what = [site.address, str(rank), str(options.megabytes), str(options.times)]
        command = [*site.command, sys.executable, "-m", "benchmarks.streams", "--member", *what]
        members.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    hosts = json.dumps([each.stdout.readline().strip() for each in members])
    found = []
    for each in members:
        print(hosts, file=each.stdin, flush=True)
    for each in members:
        found.append(json.loads(each.stdout.readline()))
    for each in members:
        each.communicate("\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400, help="that each member sends")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--bandwidth", help="of each member's link, as 1gbit; default: loopback")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        host, *numbers = options.member
        member(host, *map(int, numbers))
    network = rate_limited(options.members, options.bandwidth) if options.bandwidth else nullcontext()
    with network as made:
        sites = made.sites if made else [Site((), "127.0.0.1")] * options.members
        found = measure(sites, options)
    print("| members | link | MB/s in each direction | processor ns a byte | seconds to connect |")
    rate, processor, connected = (sum(values) / len(values) for values in zip(*found, strict=True))
    link = options.bandwidth or "loopback"
    print(f"| {options.members} | {link} | {rate / 1e6:.0f} | {processor * 1e9:.2f} | {connected:.3f} |")


if __name__ == "__main__":
    main()
