"""The recipe for two sites of `docs/two_sites.md` in network namespaces (as root, with nftables).

    python -m benchmarks.two_sites FOLDER                         # commits rounds, counts packets
    python -m benchmarks.two_sites FOLDER --minimum 2 --cut 30    # cuts the link for 30 s, prints what the islands did

The page's nftables file is used as it is. A second table of nftables counts the packets, and drops all but those of the
page's ports in both directions.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.faults import write_inputs
from benchmarks.latency import delayed
from tests.fleet import GREGALE, Fleet, Seconds
from tests.namespaces import Network, rate_limited, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "two_sites.md"
NAMES = ("oslo", "turin")
LIGHTHOUSE_PORT, ISLAND_PORT = 29510, 29511
WAN, PACE_SECONDS = Seconds(heartbeat=10.0, reduce=60.0), 0.1
ROUNDS, ROUND_TRIP_SECONDS = 10, 0.1  # a packet and its answer pass four links
OUTER = """table inet outer {
  chain input { type filter hook input priority -10; iifname eth0 jump count; }
  chain output { type filter hook output priority -10; oifname eth0 jump count; }
  chain count {
    tcp dport { 29510, 29511 } counter accept; tcp sport { 29510, 29511 } counter accept; counter drop;
  }
}
"""


def use_firewall(network: Network, folder: Path) -> None:
    """Bring up the page's firewall and the counters on both sites."""
    (rules,) = re.findall(r"```nft\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in (("gregale.nft", rules), ("outer.nft", OUTER)):
        (file := folder / name).write_text(text, encoding="utf-8")
        for site in network.sites:
            run(*site.command, "nft", "-f", str(file))


class Sites(Fleet):
    """A fleet whose lighthouse is at the first site."""

    def start_lighthouse(self) -> subprocess.Popen:
        assert self.network
        site = self.network.sites[0]
        self.addresses = [f"{site.address}:{LIGHTHOUSE_PORT}"]
        command = [*site.command, *GREGALE, "lighthouse", "--bind", f"0.0.0.0:{LIGHTHOUSE_PORT}"]
        command += ["--token_file", str(self.token)]
        self.lighthouse = self._process(command, self.folder / "lighthouse.log", {})
        return self.lighthouse


def cut(fleet: Fleet, network: Network, seconds: float) -> None:
    """Cut the link, restore it, and print what each island has done meanwhile."""
    before = {name: (fleet.newest(name), island.step()) for name, island in fleet.islands.items()}
    network.cut(1)
    time.sleep(seconds)
    for name, island in fleet.islands.items():
        rounds, steps = fleet.newest(name) - before[name][0], island.step() - before[name][1]
        print(f"{name}: {rounds} rounds and {steps} steps during {seconds:g} s without the link")
    newest = fleet.newest()
    network.restore(1)
    print(f"together again after {fleet.wait_for_members(NAMES, 300, newest):.1f} s")
    healed = {each.island for each in fleet.observe() if each.healed and each.round >= newest}
    print(f"healed, without its steps since its last round: {', '.join(healed) or 'nobody'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs and runs; a new one")
    parser.add_argument("--minimum", type=int, default=1, help="islands.min_members")
    parser.add_argument("--cut", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    write_inputs(options.folder)
    links = delayed(ROUND_TRIP_SECONDS / 4)
    with rate_limited(2, None, make=links) as network:
        use_firewall(network, options.folder)
        arguments = (
            "--islands.network",
            "wan",
            "--islands.min_members_to_start",
            "2",
            "--islands.min_members",
            str(options.minimum),
        )
        with Sites(options.folder.resolve(), "fleet.yaml", WAN, arguments, True, network, PACE_SECONDS) as fleet:
            for name, site in zip(NAMES, network.sites, strict=True):
                own = f"{site.address}:{ISLAND_PORT}"
                fleet.start(name, "--islands.bind", f"0.0.0.0:{ISLAND_PORT}", "--islands.address", own)
            fleet.wait(lambda: fleet.newest() >= ROUNDS, 300, f"{ROUNDS} rounds")
            if options.cut:
                cut(fleet, network, options.cut)
            print(f"{fleet.check()} rounds are the same on both sites")
            for site, name in zip(network.sites, NAMES, strict=True):
                print(name, run(*site.command, "nft", "list", "chain", "inet", "outer", "count"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
