"""Provides the time of a collective on the links between the chips of a TPU slice.

    Grid(chip.ici, sizes, coordinates, devices_a_chip).seconds(collective)

A slice is a grid of chips with links between neighbours. An axis is a ring or a line (`gregale.audit.chips.Ici`). All
times are lower bounds: the busiest link at the compiler's best use of all axes, without latency.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from gregale.audit.chips import Chip, Ici
from gregale.audit.collectives import Collective
from gregale.audit.groups import Groups


@dataclass(frozen=True)
class Grid:
    """The chips of each slice.

    - `sizes`: of the axes
    - `coordinates`: [device, axis] of all devices of the mesh, in its order
    - `devices_a_chip`: devices that share a chip's links
    """

    ici: Ici
    sizes: tuple[int, ...]
    coordinates: np.ndarray
    devices_a_chip: int = 1

    def seconds(self, each: Collective) -> float | None:
        """Return the seconds of one run of a collective inside a slice; None if its groups are unknown."""
        return self.seconds_of(each.kind, each.bytes, each.bytes_sent, each.groups)

    def seconds_of(self, kind: str, size: int, sent: float, groups: Groups) -> float | None:
        """Return the seconds of one run of a collective; arguments as of `Collective`.

        - reductions and gathers: the bytes that a device sends, over the links of a group's corner
        - all-to-all: the bytes across the middle of the axis with the fewest links for its chips
        - permutations: the bytes over the links between a pair, which other pairs at that distance share
        """
        if not groups:
            return None
        rate = self.ici.bytes_per_second / self.devices_a_chip
        if kind in ("collective-permute", "send"):
            return sent * self._hops(groups) / rate
        spans = self.spans(max(groups, key=len))
        links = sum(own for _, own in spans)
        if not links:
            return None
        bound = sent / links
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Of `count` devices each sends an equal part to each other: floor(count^2 / 4) parts cross the middle.
            bound = max(bound, max(size * (count**2 // 4) / count / own for count, own in spans))
        return bound / rate

    def spans(self, group: Sequence[int]) -> list[tuple[int, float]]:
        """Return for each axis along which a group's devices differ their number, and the first one's own links.

        A group with a stride shares the links with as many others.
        """
        found = []
        for axis, (size, links) in enumerate(zip(self.sizes, self.ici.links(self.sizes), strict=True)):
            values = np.unique(self.coordinates[list(group), axis])
            if (count := len(values)) > 1:
                stride = int(values[-1] - values[0]) // (count - 1)
                found.append((count, (links if stride * count == size else 1) / stride))
        return found

    def _hops(self, pairs: Sequence[Sequence[int]]) -> int:
        """Return the median distance of the pairs, at least 1: if all chips send as far, each link carries so many."""
        ends, rings = self.coordinates[np.array(pairs)], np.array(self.ici.links(self.sizes)) == 2
        apart = np.abs(ends[:, 0] - ends[:, 1])
        around = np.where(rings, np.array(self.sizes) - apart, apart)
        return max(1, int(np.median(np.minimum(apart, around).max(1))))


def grid_of(mesh: Mesh, chip: Chip, devices_a_chip: int) -> Grid | None:
    """Return the grid of a mesh's devices; None if they have no coordinates, or the chip no ICI."""
    devices = list(mesh.devices.flat)
    if chip.ici is None or not all(hasattr(device, "coords") for device in devices):
        return None
    coordinates = np.array([device.coords for device in devices])
    coordinates = coordinates - coordinates.min(0)
    return Grid(chip.ici, tuple(int(size) + 1 for size in coordinates.max(0)), coordinates, devices_a_chip)
