"""Seconds of a reduce among islands with links of unequal rates, beside the bound of the slowest (as root).

    python -m benchmarks.unequal_links --bandwidths 100mbit 100mbit 50mbit 10mbit --codec int4
    python -m benchmarks.unequal_links --round_trip_ms 60
    python -m benchmarks.unequal_links --bandwidths 10mbit 10mbit --codec topk:1     # in one phase

Real groups in network namespaces, one process a member. As in a round, members measure their links, and the next reduce
has the parts that follow. The bound: the slowest member sends its message once and receives the averages once, each at
the link's rate less 5 % for the heads of packets and TLS; and a round trip for each phase. The last reduce has equal
parts again: all members have the same bits in all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np

from benchmarks.latency import delayed
from gregale.codecs.codec import ReduceConfig
from gregale.communication.quantised import rows_of
from gregale.islands.network_reducer import NetworkReducer
from gregale.islands.protocol.decision import parts
from gregale.islands.transport.group import Group
from gregale.islands.transport.link_rate import LinkRate
from gregale.islands.transport.server import Endpoint, Server
from tests.namespaces import Network, bits_per_second, rate_limited

TOKEN, SECONDS, PAYLOAD = b"a benchmark's token", 600.0, 0.95


def reducer_of(codec: str, values: int) -> NetworkReducer:
    name, _, phases = codec.partition(":")
    second = {"phases": 1} if phases == "1" else {"gather_codec": name}
    config = ReduceConfig(codec=name, feedback=None, **second)
    return NetworkReducer(config, {"theta|0": rows_of(values, config)})


def member(host: str, rank: int, codec: str, values: int) -> None:
    """A member; prints its address, takes all addresses, then takes the parts of each reduce and prints its results."""
    server, rate, reducer = Server(Endpoint(host), TOKEN, dict), LinkRate(), reducer_of(codec, values)
    print(json.dumps(server.address), flush=True)
    hosts = json.loads(input())
    group = Group("key", rank, hosts, server)
    reducer.compile()
    rows = reducer.rows["theta|0"]
    own = np.random.default_rng(rank).standard_normal(values).astype(np.float32)
    messages = {"theta|0": np.asarray(rows.first_codec(reducer.config).encode(rows.to_rows(jnp.asarray(own))))}
    group.connect(SECONDS)
    print(json.dumps(messages["theta|0"].nbytes), flush=True)
    while line := sys.stdin.readline():
        began = time.monotonic()
        with rate.measured(group.streams):
            found = reducer.reduce(messages, [1.0] * len(hosts), group, None, SECONDS, json.loads(line))
        seconds = time.monotonic() - began
        digest = hashlib.blake2b(found.gradient["theta|0"].tobytes(), digest_size=8).hexdigest()
        print(json.dumps([seconds, rate.level, digest]), flush=True)
    os._exit(0)


def measure(network: Network, options: argparse.Namespace) -> None:
    members = []
    for rank, (site, bandwidth) in enumerate(zip(network.sites, options.bandwidths, strict=True)):
        network.limit(rank, bandwidth)
        what = [site.address, str(rank), options.codec, str(options.values)]
        command = [*site.command, sys.executable, "-m", "benchmarks.unequal_links", "--member", *what]
        members.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def tell(value: object) -> None:
        for each in members:
            print(json.dumps(value), file=each.stdin, flush=True)

    def answers() -> list:
        return [json.loads(each.stdout.readline()) for each in members]

    tell(answers())
    (size,) = set(answers())
    slowest = min(map(bits_per_second, options.bandwidths)) * PAYLOAD
    sent = len(options.bandwidths) - 1 if options.codec.endswith(":1") else 1
    bound = 8 * sent * size / slowest + 2 * options.round_trip_ms / 1000
    print(f"{options.codec}, {size / 1e6:.2f} MB a message, bound {bound:.2f} s")
    print("| reduce | parts of 256 | seconds | by the bound | levels of the links |")
    digests, split = set(), ()
    for number in range(options.times + 1):
        tell(used := () if number == options.times else split)
        found = answers()
        seconds, levels = max(each[0] for each in found), [each[1] for each in found]
        digests |= {each[2] for each in found}
        print(f"| {number} | {used or 'equal'} | {seconds:.2f} | {seconds / bound:.2f} | {levels} |", flush=True)
        split = parts(levels)
    assert len(digests) == 1, "the bits depend on the parts"
    for each in members:
        each.kill()
        each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidths", nargs="+", default=["100mbit", "100mbit", "50mbit", "10mbit"])
    parser.add_argument("--codec", default="none")
    parser.add_argument("--values", type=int, default=5_000_000)
    parser.add_argument("--round_trip_ms", type=float, default=0.0)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        host, rank, codec, values = options.member
        member(host, int(rank), codec, int(values))
    make = delayed(options.round_trip_ms / 4000) if options.round_trip_ms else Network
    with rate_limited(len(options.bandwidths), None, make=make) as network:
        measure(network, options)


if __name__ == "__main__":
    main()
