"""Two sites that only connect outwards and an open one, in network namespaces (as root): rounds, deaths, recoveries.

    python -m benchmarks.outwards FOLDER

Packets to the ports of the sites `b` and `c` are dropped, as by a NAT. The coordinator finds that it does not reach
them. All messages between `b` and `c` pass through it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.fault_kinds import Run
from benchmarks.faults import write_inputs
from tests.fleet import Fleet, Seconds
from tests.namespaces import rate_limited

NAMES, CLOSED = ("a", "b", "c"), ("b", "c")
PORT, PACE_SECONDS, PATIENCE_SECONDS = 29511, 0.1, 240.0
OPTIONS = ("--islands.min_members", "1", "--islands.min_members_to_start", "3")


class Sites(Fleet):
    def start(self, name: str, *options: str, **more):
        """Starts an island at the port that a site that only connects outwards drops."""
        assert self.network
        site = self.sites.get(name) or self.network.sites[len(self.sites)]
        return super().start(name, *options, "--islands.bind", f"{site.address}:{PORT}", **more)


def killed(run: Run, name: str) -> str:
    """Kill an island, wait for the others, start it again; return seconds until each."""
    run.ready()
    began = time.time()
    run.fleet.islands[name].kill()
    again = run.again((name,), began)
    began = time.time()
    run.fleet.start(name)
    return f"others {again:.1f} s; back {run.back((name,), began):.1f} s"


def restarted_coordinator(run: Run) -> str:
    run.ready()
    run.fleet.lighthouse.kill()
    run.fleet.lighthouse.wait()
    run.fleet.start_lighthouse()
    began, newest = time.time(), run.fleet.newest()
    run.fleet.wait_for_members(run.names, run.patience, newest)
    return f"a round of all after {time.time() - began:.1f} s"


def listens(fleet: Fleet, name: str) -> bool:
    """Whether the island listens, and the other sites' connections to it are dropped."""
    address = fleet.sites[name].address
    probe = f"import socket; socket.create_connection(('{address}', {PORT}), 2).close()"
    (inside, outside) = (
        subprocess.run([*site, sys.executable, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode
        for site in (fleet.sites[name].command, fleet.sites["a"].command)
    )
    return inside == 0 and outside != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs and runs; a new one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    write_inputs(options.folder)
    with rate_limited(3, None) as network:
        for index, name in enumerate(NAMES):
            if name in CLOSED:
                network.drop_incoming(index)
        with Sites(options.folder.resolve(), "fleet.yaml", Seconds(), OPTIONS, True, network, PACE_SECONDS) as fleet:
            for name in NAMES:
                fleet.start(name)
            run = Run(fleet, NAMES, PATIENCE_SECONDS)
            fleet.wait_for_members(NAMES, PATIENCE_SECONDS)
            assert all(listens(fleet, name) for name in CLOSED)
            for name in NAMES:
                print(f"{name} killed: {killed(run, name)}", flush=True)
            print(f"coordinator killed: {restarted_coordinator(run)}", flush=True)
            run.ready()
            healed = sorted({each.island for each in fleet.observe() if each.healed})
            print(f"healed: {', '.join(healed)}; {fleet.check()} rounds are the same on all sites")
    return 0


if __name__ == "__main__":
    sys.exit(main())
