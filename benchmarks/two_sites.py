"""The recipe for two sites of `docs/islands.md`, carried out in network namespaces (as root, with wireguard-go and nftables).

    python benchmarks/two_sites.py                                # commits rounds through the tunnel, counts packets
    python benchmarks/two_sites.py --minimum 2 --cut 30           # cuts the link for 30 s, and says what the islands did

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
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import write_inputs
from fleet import GREGALE, Fleet, Seconds, metrics
from latency import delayed

from gregale.islands.engine.namespaces import Network, Site, rate_limited, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "islands.md"
NAMES = ("oslo", "turin")
LIGHTHOUSE, SERVER = 29510, 29511
OUTER = """table inet outer {
  chain input { type filter hook input priority -10; iifname eth0 jump count; }
  chain output { type filter hook output priority -10; oifname eth0 jump count; }
  chain count { udp dport 51820 counter accept; counter drop; }
}
"""


def files(language: str) -> list[str]:
    """The files of this language that the page shows."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def filled(text: str, network: Network, keys: dict[str, str]) -> str:
    """A file of the page with real keys and addresses."""
    for name, site in zip(NAMES, network.sites, strict=True):
        text = text.replace(f"{name}.example.org", site.address)
        public = subprocess.run(["wg", "pubkey"], input=keys[name], capture_output=True, text=True, check=True).stdout
        text = text.replace(f"{name.upper()}_PRIVATE_KEY", keys[name]).replace(f"{name.upper()}_PUBLIC_KEY", public)
    return text


@contextmanager
def tunnel(network: Network, folder: Path) -> Iterator[None]:
    """Bring up the firewall and WireGuard on both sites."""
    keys = {name: run("wg", "genkey") for name in NAMES}
    try:
        for site, name, config in zip(network.sites, NAMES, files("ini"), strict=True):
            (own := folder / name).mkdir()
            (own / "gregale.conf").touch(0o600)
            (own / "gregale.conf").write_text(filled(config, network, keys))
            (own / "gregale.nft").write_text(OUTER + files("nft")[0])
            run(*site.command, "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
            run(*site.command, "nft", "-f", str(own / "gregale.nft"))
            up = f"mkdir -p /run/wireguard && mount -t tmpfs none /run/wireguard && wg-quick up {own / 'gregale.conf'}"
            run(*site.command, "sh", "-c", up)
        yield
    finally:
        for site in network.sites:
            for process in run("ip", "netns", "pids", site.command[-1]).split():  # wireguard-go
                os.kill(int(process), signal.SIGKILL)


class Tunnelled(Fleet):
    """A fleet whose lighthouse is at the first site."""

    def start_lighthouse(self) -> subprocess.Popen:
        assert self.network
        site = self.network.sites[0]
        self.address = f"{site.address.partition(':')[0]}:{LIGHTHOUSE}"
        command = [*site.command, *GREGALE, "lighthouse", "--bind", self.address, "--token_file", str(self.token)]
        command += ["--heartbeat_seconds", str(self.seconds.heartbeat), "--join_seconds", str(self.seconds.join)]
        self.lighthouse = self._process(command, self.folder / "lighthouse.log", {})
        return self.lighthouse


def cut(fleet: Tunnelled, network: Network, seconds: float) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minimum", type=int, default=1, help="islands.minimum")
    parser.add_argument("--rounds", type=int, default=10, help="that both make first")
    parser.add_argument("--cut", type=float, default=0.0, help="seconds")
    parser.add_argument("--round_trip_ms", type=float, default=100.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    one_way = options.round_trip_ms / 1000 / 4  # a packet passes two sites' links
    with tempfile.TemporaryDirectory() as name, rate_limited(2, None, make=delayed(one_way)) as network:
        folder = Path(name)
        write_inputs(folder / "fleet")
        with tunnel(network, folder):
            inner = [Site(site.command, f"10.8.0.{index}:{SERVER}") for index, site in enumerate(network.sites, 1)]
            network.sites[:] = inner
            arguments = ("--islands.start", "2", "--islands.minimum", str(options.minimum))
            with Tunnelled(folder / "fleet", "fleet.yaml", Seconds(), arguments, True, network, 0.1) as fleet:
                for name in NAMES:
                    fleet.start(name)
                fleet.wait(lambda: fleet.newest() >= options.rounds, 300, f"{options.rounds} rounds")
                if options.cut:
                    cut(fleet, network, options.cut)
                print(f"{fleet.check()} rounds are the same on both sites")
                for site, name in zip(network.sites, NAMES, strict=True):
                    print(name, run(*site.command, "nft", "list", "chain", "inet", "outer", "count"))
                print(fleet.tails() if options.cut else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
