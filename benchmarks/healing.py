"""Seconds that a joiner needs to fetch an island's state over links with a delay (as root; see latency.py).

    python -m benchmarks.healing --megabytes 0.92 --arrays 60 --bandwidth 50mbit --round_trip_ms 100

The yardstick of the same run is one plain TCP connection that carries as many bytes. The aim is
2 (bytes / bandwidth + 5 round trips).
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing

import numpy as np

from benchmarks.latency import delayed
from gregale.islands.transport.server import Endpoint, Server
from gregale.islands.transport.transfer import Fetcher, Snapshot, VersionedArray
from tests.namespaces import bits_per_second, rate_limited

TOKEN = b"a benchmark's token"


def sizes(megabytes: float, arrays: int) -> list[int]:
    """Floats in each array: one of a half of the state, the others alike."""
    total = int(megabytes * 1e6 / 4)
    return [total // 2] + [total // 2 // (arrays - 1)] * (arrays - 1)


def serve(address: str, megabytes: float, arrays: int) -> None:
    """A source: serves a state, and as many plain bytes; prints both addresses."""
    random = np.random.default_rng(0)
    state = {
        f"leaf{index}|0": VersionedArray(random.standard_normal(size).astype(np.float32), 0)
        for index, size in enumerate(sizes(megabytes, arrays))
    }
    server = Server(Endpoint(address), TOKEN, lambda message: {})
    server.outer.publish(Snapshot(1, 4, state, {"outer": None}))
    plain = socket.create_server((address, 0))
    print(json.dumps([server.address, f"{address}:{plain.getsockname()[1]}"]), flush=True)
    content = b"".join(leaf.array.tobytes() for leaf in state.values())
    while True:
        connection, _ = plain.accept()
        with connection:
            connection.sendall(content)


def join(sources: list[list[str]], megabytes: float, arrays: int, times: int) -> None:
    """A joiner: prints the seconds of each fetch, and of each plain transfer."""
    expected = {
        f"leaf{index}|0": ((size,), np.dtype(np.float32)) for index, size in enumerate(sizes(megabytes, arrays))
    }
    fetched, plain = [], []
    for _ in range(times):
        began = time.monotonic()
        with closing(Fetcher(TOKEN, expected)) as fetcher:
            fetcher.fetch([source[0] for source in sources], 600.0)
        fetched.append(time.monotonic() - began)
        began = time.monotonic()
        host, port = sources[0][1].split(":")
        with socket.create_connection((host, int(port))) as connection:
            while connection.recv(1 << 16):
                pass
        plain.append(time.monotonic() - began)
    print(json.dumps([fetched, plain]))


def measure(options: argparse.Namespace) -> None:
    one_way = options.round_trip_ms / 1000 / 4  # a packet passes two sites' links
    state = ["--megabytes", str(options.megabytes), "--arrays", str(options.arrays)]
    with rate_limited(options.sources + 1, options.bandwidth, make=delayed(one_way)) as network:
        *served, joiner = network.sites
        processes, addresses = [], []
        for site in served:
            command = [*site.command, sys.executable, "-m", "benchmarks.healing", "--serve", site.address, *state]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            addresses.append(json.loads(processes[-1].stdout.readline()))
        command = [*joiner.command, sys.executable, "-m", "benchmarks.healing", "--join", json.dumps(addresses), *state]
        done = subprocess.run([*command, "--times", str(options.times)], stdout=subprocess.PIPE, text=True, check=True)
        for process in processes:
            process.kill()
    fetched, plain = json.loads(done.stdout)
    aim = 2 * (8e6 * options.megabytes / bits_per_second(options.bandwidth) + 5 * options.round_trip_ms / 1000)
    print("| MB | arrays | sources | Mbit/s | round trip ms | fetch s (median, most) | one TCP connection s | aim s |")
    print(
        f"| {options.megabytes:g} | {options.arrays} | {options.sources} | {options.bandwidth} | "
        f"{options.round_trip_ms:g} | {statistics.median(fetched):.2f}, {max(fetched):.2f} | "
        f"{statistics.median(plain):.2f} | {aim:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=0.92)
    parser.add_argument("--arrays", type=int, default=60)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--bandwidth", default="50mbit")
    parser.add_argument("--round_trip_ms", type=float, default=100)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--serve")
    parser.add_argument("--join")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.megabytes, options.arrays)
    elif options.join:
        join(json.loads(options.join), options.megabytes, options.arrays, options.times)
    else:
        measure(options)


if __name__ == "__main__":
    main()
