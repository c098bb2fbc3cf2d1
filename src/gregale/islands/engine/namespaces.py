"""Network namespaces with rate-limited links on this machine: several islands as on several sites.

with rate_limited(count=3, bandwidth="200mbit") as network:
    network.coordinator                    # address of the bridge: where the coordinator listens
    for site in network.sites:
        subprocess.Popen([*site.command, "gregale", "island", ...])    # site.address: its own address
    network.cut(1); network.restore(1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """`command` runs what follows it inside of the namespace; `address` is the namespace's own."""

    command: tuple[str, ...]
    address: str


class Network:
    """A bridge and its sites."""

    coordinator: str
    sites: list[Site]

    def cut(self, index: int) -> None:
        """Takes a site's link down: packets vanish, nobody is told."""

    def restore(self, index: int) -> None: ...


@contextmanager
def rate_limited(count: int, bandwidth: str | None) -> Iterator[Network]:
    """Sites whose links carry `bandwidth` (`200mbit`, as `tc` writes it; None: no limit) in each direction.

    Removed at the end, with what a killed run has left. Raises UserError where not root, or without `ip` and `tc`.
    """
    raise NotImplementedError
    yield
