"""The recipe for two sites of `docs/two_sites.md` in network namespaces (as root, with wireguard-go and nftables).

    python -m benchmarks.two_sites FOLDER                         # commits rounds through the tunnel, counts packets
    python -m benchmarks.two_sites FOLDER --minimum 2 --cut 30    # cuts the link for 30 s, prints what the islands did

The page's WireGuard and nftables files are used as they are, but for keys and names. A second table of nftables counts
the outer link's packets, and drops all but WireGuard's in both directions.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults import write_inputs
from benchmarks.latency import delayed
from tests.fleet import GREGALE, Fleet, Seconds
from tests.namespaces import Network, Site, rate_limited, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "two_sites.md"
NAMES = ("oslo", "turin")
LIGHTHOUSE, SERVERS = "10.8.0.1:29510", ("10.8.0.1:29511", "10.8.0.2:29511")
WAN, PACE_SECONDS = Seconds(heartbeat=10.0, reduce=60.0), 0.1
ROUNDS, ROUND_TRIP_SECONDS = 10, 0.1  # a packet and its answer pass four links
OUTER = """table inet outer {
  chain input { type filter hook input priority -10; iifname eth0 jump count; }
  chain output { type filter hook output priority -10; oifname eth0 jump count; }
  chain count { udp dport 51820 counter accept; counter drop; }
}
"""


def filled(text: str, network: Network, keys: dict[str, str]) -> str:
    """A file of the page with real keys and addresses."""
    for name, site in zip(NAMES, network.sites, strict=True):
        text = text.replace(f"{name}.example.org", site.address)
        public = subprocess.run(["wg", "pubkey"], input=keys[name], capture_output=True, text=True, check=True).stdout
        text = text.replace(f"{name.upper()}_PRIVATE_KEY", keys[name]).replace(f"{name.upper()}_PUBLIC_KEY", public)
    return text


@contextmanager
def tunnel(network: Network, folder: Path) -> Iterator[None]:
    """Bring up the firewall and WireGuard on both sites, by the page's files."""
    page = PAGE.read_text(encoding="utf-8")
    (rules,), configs = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("nft", "ini"))
    keys = {name: run("wg", "genkey") for name in NAMES}
    try:
        for site, name, config in zip(network.sites, NAMES, configs, strict=True):
            (own := folder / name).mkdir()
            (config_file := own / "gregale.conf").touch(0o600)
            config_file.write_text(filled(config, network, keys))
            (own / "gregale.nft").write_text(rules)
            run(*site.command, "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
            run(*site.command, "nft", "-f", str(own / "gregale.nft"))
            up = f"mkdir -p /run/wireguard && mount -t tmpfs none /run/wireguard && wg-quick up {config_file}"
            run(*site.command, "sh", "-c", up)
        (counting := folder / "outer.nft").write_text(OUTER)
        for site in network.sites:
            run(*site.command, "nft", "-f", str(counting))
        yield
    finally:
        for site in network.sites:
            for process in run("ip", "netns", "pids", site.command[-1]).split():  # wireguard-go
                os.kill(int(process), signal.SIGKILL)


class Tunnelled(Fleet):
    """A fleet whose lighthouse is at the first site."""

    def start_lighthouse(self) -> subprocess.Popen:
        assert self.network
        self.address = LIGHTHOUSE
        command = [*self.network.sites[0].command, *GREGALE, "lighthouse", "--bind", LIGHTHOUSE]
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
    with rate_limited(2, None, make=links) as network, tunnel(network, options.folder.resolve()):
        network.sites[:] = [Site(site.command, server) for site, server in zip(network.sites, SERVERS, strict=True)]
        arguments = (
            "--islands.network",
            "wan",
            "--islands.min_members_to_start",
            "2",
            "--islands.min_members",
            str(options.minimum),
        )
        with Tunnelled(options.folder.resolve(), "fleet.yaml", WAN, arguments, True, network, PACE_SECONDS) as fleet:
            for name in NAMES:
                fleet.start(name)
            fleet.wait(lambda: fleet.newest() >= ROUNDS, 300, f"{ROUNDS} rounds")
            if options.cut:
                cut(fleet, network, options.cut)
            print(f"{fleet.check()} rounds are the same on both sites")
            for site, name in zip(network.sites, NAMES, strict=True):
                print(name, run(*site.command, "nft", "list", "chain", "inet", "outer", "count"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
