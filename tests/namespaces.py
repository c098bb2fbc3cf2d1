"""Network namespaces with rate-limited links on this machine: several islands as on several sites.

    with rate_limited(count=3, bandwidth="200mbit") as network:
        network.coordinator                    # address of the bridge: where the coordinator listens
        for site in network.sites:
            subprocess.Popen([*site.command, "gregale", "island", ...])    # site.address: its own address
        network.cut(1); network.restore(1); network.cut(1, "sends"); network.limit(1, "50mbit")

A bridge, and for each site a namespace whose only link ends in the bridge. Both ends of the link have a token bucket
(`tc ... tbf`): one limits what the site sends, the other what it receives. All names have the number of the process
that made them, so that what a killed one has left is known and removed by the next.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "grg"  # a link's name has at most 15 characters
NAME = re.compile(rf"{PREFIX}(\d+)(?:-\d+)?")
HOSTS_FOLDER = Path("/etc/netns")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# A bucket holds what the link carries in 4 ms, and at least one of the kernel's largest packets.
BURST_SECONDS = 0.004
SMALLEST_BURST_BYTES = 64 << 10
QUEUE = "50ms"
CLIENT_PORTS = 32768  # the first port that the kernel gives to a client
NOTHING = ("rate", "8bit", "burst", "1", "limit", "1")  # every packet is larger than the bucket, and vanishes


class NoNetworkError(RuntimeError):
    """No network can be made on this machine."""


@dataclass(frozen=True)
class Site:
    """`command` runs what follows it inside of the namespace; `address` is the namespace's own."""

    command: tuple[str, ...]
    address: str


class Network:
    def __init__(self, count: int, bandwidth: str | None, subnet: str):
        self.coordinator = f"{subnet}.1"
        self.sites: list[Site] = []
        self._bandwidths: list[str | None] = []  # by site
        self._bridge = f"{PREFIX}{os.getpid()}"
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.coordinator}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for index in range(count):
            self._add(index, f"{subnet}.{index + 2}", bandwidth)

    def cut(self, index: int, direction: str = "both") -> None:
        """Cuts a site's link: packets vanish, nobody is told.

        - `direction`: both; `sends`: what the site sends; `receives`: what it receives
        """
        if direction == "both":
            run("ip", "link", "set", self._name(index), "nomaster")
        else:
            inside = ("tc", "-netns", self._name(index)), "eth0"
            command, device = inside if direction == "sends" else (("tc",), self._name(index))
            run(*command, "qdisc", "replace", "dev", device, "root", "tbf", *NOTHING)

    def restore(self, index: int) -> None:
        run("ip", "link", "set", self._name(index), "master", self._bridge)
        self.limit(index, self._bandwidths[index])

    def limit(self, index: int, bandwidth: str | None) -> None:
        """Lets a site's link carry so much in each direction from now on; None: as much as this machine can."""
        self._bandwidths[index] = bandwidth
        outside, inside = ("tc",), ("tc", "-netns", self._name(index))
        for command, device in ((outside, self._name(index)), (inside, "eth0")):
            if bandwidth is None:
                with suppress(subprocess.CalledProcessError):  # there was no limit
                    run(*command, "qdisc", "delete", "dev", device, "root")
                continue
            burst = max(BURST_SECONDS * bits_per_second(bandwidth) / 8, SMALLEST_BURST_BYTES)
            bucket = ("root", "tbf", "rate", bandwidth, "burst", str(round(burst)), "latency", QUEUE)
            run(*command, "qdisc", "replace", "dev", device, *bucket)

    def drop_incoming(self, index: int) -> None:
        """Drops connections to the site, as a NAT does: all packets to ports that are not those of clients.

        What listens there has to listen at a port below `CLIENT_PORTS`. The rule has to precede that of own addresses.
        """
        rule = ("ip", "-netns", self._name(index), "rule")
        run(*rule, "add", "pref", "2", "table", "local")
        run(*rule, "delete", "pref", "0")
        ports = f"1-{CLIENT_PORTS - 1}"
        run(*rule, "add", "pref", "1", "iif", "eth0", "ipproto", "tcp", "dport", ports, "blackhole")

    def link(self, name: str) -> None:
        """Makes the devices of a site's link: `name` here, and `eth0` in the namespace of that name."""
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)

    def close(self) -> None:
        """Ends what the links need beside the kernel: nothing."""

    def _name(self, index: int) -> str:
        return f"{self._bridge}-{index}"

    def _add(self, index: int, address: str, bandwidth: str | None) -> None:
        name = self._name(index)
        run("ip", "netns", "add", name)
        self.link(name)
        run("ip", "link", "set", name, "master", self._bridge, "up")
        run("ip", "-netns", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-netns", name, "link", "set", device, "up")
        self._bandwidths.append(bandwidth)
        self.limit(index, bandwidth)
        hosts = HOSTS_FOLDER / name / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n", encoding="utf-8")
        self.sites.append(Site(("ip", "netns", "exec", name), address))


@contextmanager
def rate_limited(
    count: int, bandwidth: str | None, make: Callable[[int, str | None, str], Network] = Network
) -> Iterator[Network]:
    """Sites whose links carry `bandwidth` (`200mbit`, as `tc` writes it; None: no limit) in each direction.

    - `make`: makes the network of this many sites, of this bandwidth, in this subnet

    Removed at the end, with what a killed run has left.

    Raises:
        NoNetworkError: no network can be made here.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoNetworkError("Network namespaces take root, and the tools `ip` and `tc` of the package iproute2.")
    network = None
    try:
        try:
            with one_at_a_time():
                remove_made_by(lambda maker: maker == os.getpid() or not Path(f"/proc/{maker}").exists())
                network = make(count, bandwidth, free_subnet())
        except subprocess.CalledProcessError as error:
            raise NoNetworkError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        yield network
    finally:
        if network is not None:
            network.close()
        remove_made_by(lambda maker: maker == os.getpid())


def bits_per_second(bandwidth: str) -> float:
    return float(bandwidth[:-4]) * BITS[bandwidth[-4:]]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def free_subnet() -> str:
    """The first three numbers of a network that no interface of this machine has."""
    interfaces = json.loads(run("ip", "-json", "address"))
    taken = {address["local"] for each in interfaces for address in each["addr_info"]}
    for number in range(256):
        subnet = f"10.213.{number}"
        if not any(address.startswith(f"{subnet}.") for address in taken):
            return subnet
    raise NoNetworkError("All networks from 10.213.0.0 to 10.213.255.0 are taken on this machine.")


def remove_made_by(is_meant: Callable[[int], bool]) -> None:
    """Removes namespaces, links and folders of this module, by the numbers of the processes that made them."""
    links = {link["ifname"] for link in json.loads(run("ip", "-json", "link"))}
    spaces = {space["name"] for space in json.loads(run("ip", "-json", "netns") or "[]")}
    for name in sorted(links | spaces | {path.name for path in HOSTS_FOLDER.glob(f"{PREFIX}*")}):
        if (found := NAME.fullmatch(name)) and is_meant(int(found[1])):
            remove(name)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two runs at once do not take the same network."""
    HOSTS_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = os.open(HOSTS_FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def remove(name: str) -> None:
    """A namespace takes its end of the link with it, and so the other end, once nothing runs in it any more."""
    for command in (("ip", "link", "delete", name), ("ip", "netns", "delete", name)):
        with suppress(subprocess.CalledProcessError):
            run(*command)
    shutil.rmtree(HOSTS_FOLDER / name, ignore_errors=True)
