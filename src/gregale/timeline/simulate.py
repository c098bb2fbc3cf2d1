"""Provides the exact event times of compute and transfers, and the bandwidth that a method needs.

The grid of bandwidths is the paper's (arXiv 2501.18512), and all are simulated at once.
All sites are equal and start together, so one compute resource and one link represent all of them. A pass is the
forward of layers 1 to L, then the backward of layers L to 1. A reduction starts when it is released and the link is
free (first in, first out), and the forwards that need it wait for its arrival. Nothing else waits, so all event times
follow from the schedule by additions and maxima.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gregale.timeline.methods import METHODS, Cadence, Transfer
from gregale.timeline.model import Ring, Workload

GRID_GBIT_PER_SECOND = np.logspace(-1, 3, 50)
UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Run:
    """The result of one site for every bandwidth."""

    compute_seconds: float
    total_seconds: np.ndarray  # [bandwidth] until the last compute ends and the last reduction arrives
    sent_bytes: float

    @property
    def utilisation(self) -> np.ndarray:
        """Return compute time / total time, [bandwidth]."""
        return self.compute_seconds / self.total_seconds


class _Timeline:
    def __init__(self, workload: Workload, ring: Ring, gbit_per_second: np.ndarray):
        self.workload, self.ring = workload, ring
        self.bits_per_second = np.asarray(gbit_per_second, dtype=float) * 1e9
        self.clock = np.zeros(len(gbit_per_second))
        self.link_free = np.zeros(len(gbit_per_second))
        self.last_arrival = np.zeros(len(gbit_per_second))
        self.sent_bytes = 0.0
        # By step: each layer and arrival [bandwidth] that the forward waits for.
        self.waits: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)

    def forward(self, step: int) -> None:
        """Add the forward of all layers; a layer with an arrival due at this step waits for it."""
        done = 0
        for layer, arrival in sorted(self.waits.pop(step, []), key=lambda wait: wait[0]):
            self.clock += (layer - 1 - done) * self.workload.node_seconds
            done = layer - 1
            np.maximum(self.clock, arrival, out=self.clock)
        self.clock += (self.workload.layers - done) * self.workload.node_seconds

    def backward(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Add the backward of all layers and the reductions that it releases."""
        for nodes, layer, transfer in self.releases(transfers):
            start = np.maximum(self.clock + nodes * self.workload.node_seconds, self.link_free)
            payload_bytes = transfer.bytes_per_parameter * (self.workload.parameters / self.workload.layers)
            self.link_free = start + self.ring.link_seconds(payload_bytes, self.bits_per_second)
            self.last_arrival = self.link_free + self.ring.delay_seconds
            self.sent_bytes += self.ring.sent_bytes(payload_bytes)
            self.waits[step + 1 + transfer.delay_steps].append((layer, self.last_arrival))
        self.clock += (2 * self.workload.layers - 1) * self.workload.node_seconds

    def releases(self, transfers: Sequence[Transfer]) -> list[tuple[int, int, Transfer]]:
        """Return (nodes of backward until ready, layer, transfer) in the order of the link's queue."""
        layers = self.workload.layers
        end = 2 * layers - 1
        found = [
            (end if transfer.after_pass else min(2 * (layers - layer + 1), end), layer, transfer)
            for transfer in transfers
            for layer in transfer.layers
        ]
        return sorted(found, key=lambda release: release[0])


def simulate(
    workload: Workload, transfers: Sequence[Transfer], ring: Ring, gbit_per_second: np.ndarray, steps: int
) -> Run:
    """Run `steps` steps of a schedule at each bandwidth between sites, [bandwidth], and drain the link."""
    by_pass = defaultdict(list)
    for transfer in transfers if ring.sites > 1 else ():
        by_pass[transfer.step, transfer.microbatch].append(transfer)
    timeline = _Timeline(workload, ring, gbit_per_second)
    for step in range(1, steps + 1):
        for microbatch in range(1, workload.microbatches + 1):
            timeline.forward(step)
            timeline.backward(step, by_pass[step, microbatch])
    return Run(
        compute_seconds=steps * workload.microbatches * (3 * workload.layers - 1) * workload.node_seconds,
        total_seconds=np.maximum(timeline.clock, timeline.last_arrival),
        sent_bytes=timeline.sent_bytes,
    )


def run_method(
    name: str, workload: Workload, ring: Ring, cadence: Cadence, gbit_per_second: np.ndarray, bytes_per_parameter: float
) -> Run:
    """Simulate a method by name; raise `UserError` if the schedule does not fit.

    - `bytes_per_parameter`: on the wire, the mean of a reduction's two halves
    """
    transfers = METHODS[name].schedule(workload, cadence, bytes_per_parameter)
    return simulate(workload, transfers, ring, gbit_per_second, cadence.steps)


def needed_bandwidths(utilisation: np.ndarray, goals: Sequence[float] = UTILISATIONS) -> list[float | None]:
    """Return, for each goal, the grid's first bandwidth that reaches this utilisation; None if none does."""
    # A run without waits reaches 1 only up to rounding.
    reached = [np.flatnonzero(utilisation >= goal - 1e-12) for goal in goals]
    return [float(GRID_GBIT_PER_SECOND[at[0]]) if at.size else None for at in reached]
