"""The sites of a run and the ring of links over which they average."""

from dataclasses import dataclass

import numpy as np

from gregale.errors import UserError

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce over the sites that are present.

    Each site sends 2 (n - 1) / n of the payload in 2 (n - 1) rounds. A round ends when its slowest link is done, so

    link_seconds  = 2 (n - 1) / n * 8 * payload_bytes / (bandwidth * slowest_link)
    delay_seconds = 2 (n - 1) * latency_seconds

    The links are busy for link_seconds and the result is there delay_seconds later; during the delay the links carry
    the next payload.

    Attributes:
        sites: n, the sites on the ring.
        slowest_link: speed of the slowest link on the ring, as a multiple of the nominal bandwidth.
        latency_seconds: delay of one message over one link.
    """

    sites: int
    slowest_link: float
    latency_seconds: float

    def sent_bytes(self, payload_bytes: float) -> float:
        """Bytes that each site sends to average a payload."""
        return 2 * (self.sites - 1) / self.sites * payload_bytes

    def link_seconds(self, payload_bytes: float, bits_per_second: np.ndarray) -> np.ndarray:
        """Seconds, [bandwidth], that a payload keeps the links busy at each nominal bandwidth, [bandwidth]."""
        return 8 * self.sent_bytes(payload_bytes) / (bits_per_second * self.slowest_link)

    @property
    def delay_seconds(self) -> float:
        """Seconds from the end of the sending to the arrival."""
        return 2 * (self.sites - 1) * self.latency_seconds


@dataclass(frozen=True, eq=False)
class Fleet:
    """The sites: how slow each is, when it leaves, and the links between them.

    Attributes:
        slowness: [site] step time of each site as a multiple of the workload's.
        leaves_at_step: [site] the first step (from 1) that the site no longer takes part in; `NEVER` for none.
        latency_seconds: delay of one message over one link.
        links: [site, site] speed of the link from row to column as a multiple of the nominal bandwidth, or None when
            all links have the nominal bandwidth. The diagonal is not read.

    Raises:
        UserError: the matrix does not fit the sites, or a link's speed is not positive.
    """

    slowness: np.ndarray
    leaves_at_step: np.ndarray
    latency_seconds: float = 0.0
    links: np.ndarray | None = None

    def __post_init__(self):
        sites = len(self.slowness)
        if self.links is None:
            return
        if self.links.shape != (sites, sites):
            raise UserError(
                f"links: the matrix is {' x '.join(map(str, self.links.shape))}, but there are {sites} sites; it must "
                f"be {sites} x {sites}, the link from row to column as a multiple of the bandwidth."
            )
        wrong = ~(self.links > 0) & ~np.eye(sites, dtype=bool)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise UserError(
                f"links: the link from site {row} to site {column} has the speed {self.links[row, column]}; every link "
                "off the diagonal must be above 0."
            )

    @classmethod
    def uniform(cls, sites: int, latency_seconds: float = 0.0) -> "Fleet":
        """Equal sites on equal links, all of which stay to the end."""
        return cls(np.ones(sites), np.full(sites, NEVER), latency_seconds)

    def ring_at_step(self, step: int) -> Ring:
        """The ring at a step: the sites still present in their numbered order, closed over those that left."""
        present = np.flatnonzero(self.leaves_at_step > step)
        if self.links is None or len(present) < 2:
            slowest = 1.0
        else:
            slowest = float(self.links[present, np.roll(present, -1)].min())
        return Ring(sites=len(present), slowest_link=slowest, latency_seconds=self.latency_seconds)
