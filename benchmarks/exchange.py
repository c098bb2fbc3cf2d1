"""What a group of islands' hosts carries over loopback: `python benchmarks/exchange.py [members] [megabytes]`.

Each member is a process. All-to-all, as the reducer's first leg has it: each sends an equal share of its message to
each other one, in pieces of 4 MB that are all under way at once. Prints the seconds to build a group, and the megabytes
per second that each member sends.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import numpy as np

PIECE_BYTES = 4 << 20
ROUNDS = 5


def member(rank: int, addresses, barrier, megabytes: int, results) -> None:
    from gregale.islands.engine.group import Group
    from gregale.islands.engine.server import Server

    server = Server("127.0.0.1", b"a token of the fleet", dict)
    addresses[rank] = server.address
    Group.build(f"alone {rank}", 0, [server.address], server, 5.0)  # loads PyTorch
    barrier.wait()
    begin = time.perf_counter()
    group = Group.build("all", rank, list(addresses), server, 30.0)
    built = time.perf_counter() - begin
    share = megabytes * 10**6 // len(addresses)
    others = [peer for peer in range(group.size) if peer != rank]
    sent, arrived = np.ones(share, np.uint8), {peer: np.zeros(share, np.uint8) for peer in others}
    spans = [slice(start, start + PIECE_BYTES) for start in range(0, share, PIECE_BYTES)]
    fastest = float("inf")
    for _ in range(ROUNDS):
        barrier.wait()
        begin = time.perf_counter()
        works = [group.receive(peer, arrived[peer][span], tag) for tag, span in enumerate(spans) for peer in others]
        works += [group.send(peer, sent[span], tag) for tag, span in enumerate(spans) for peer in others]
        for work in works:
            work.wait(60.0)
        fastest = min(fastest, time.perf_counter() - begin)
    results[rank] = built, share * len(others) / fastest / 1e6
    barrier.wait()
    group.drop()


def main(members: int = 2, megabytes: int = 100) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        addresses, results = manager.list([""] * members), manager.dict()
        barrier = context.Barrier(members)
        processes = [
            context.Process(target=member, args=(rank, addresses, barrier, megabytes, results))
            for rank in range(members)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for rank, (built, rate) in sorted(results.items()):
            print(f"member {rank} of {members}: group built in {built:.3f} s, sends {rate:.0f} MB/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
