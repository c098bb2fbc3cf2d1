"""The timeline itself: event times of compute and transfers, exact, for all bandwidths at once.

One compute resource a site and one link that all sites share as a ring. A pass is the forward of layers 1 to L, then
the backward of layers L to 1. A reduction starts when every present site has released it and the link is free (first
in, first out), and the forwards that need it wait for its arrival. Nothing else waits, so all event times follow from
the schedule by additions and maxima; no clock is stepped.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gregale.timeline.fleet import Fleet, Ring
from gregale.timeline.methods import Transfer
from gregale.timeline.model import Workload


@dataclass(frozen=True)
class Interval:
    """A stretch of work for a picture: what site 0 computes, or what the link carries, at the first bandwidth.

    Attributes:
        kind: "forward", "backward" or "transfer".
        step: the step it belongs to.
        layers: first and last layer.
        start: seconds from the beginning of the run.
        end: seconds from the beginning of the run.
    """

    kind: str
    step: int
    layers: tuple[int, int]
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """What came out, for every bandwidth.

    Attributes:
        compute_seconds: [site] time each site spent in compute.
        present_seconds: [site, bandwidth] until the site left, or until the last reduction had arrived.
        total_seconds: [bandwidth] until the last compute is over and the last reduction has arrived.
        sent_bytes: [site] bytes that each site sent.
        intervals: the work of site 0 and of the link at the first bandwidth.
    """

    compute_seconds: np.ndarray
    present_seconds: np.ndarray
    total_seconds: np.ndarray
    sent_bytes: np.ndarray
    intervals: list[Interval]

    @property
    def utilisation(self) -> np.ndarray:
        """[bandwidth] compute time / present time, both summed over the sites."""
        return self.compute_seconds.sum() / self.present_seconds.sum(axis=0)


@dataclass
class _Timeline:
    """Where everybody is. Sites of equal speed that leave together move in lockstep and are one group."""

    workload: Workload
    bits_per_second: np.ndarray  # [bandwidth]
    group: np.ndarray  # [present group] number of each present group
    node_seconds: np.ndarray  # [present group, 1]
    clock: np.ndarray  # [present group, bandwidth]
    link_free: np.ndarray  # [bandwidth]
    last_arrival: np.ndarray  # [bandwidth]
    traced_group: int
    waits: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=lambda: defaultdict(list))
    intervals: list[Interval] = field(default_factory=list)

    def compute(self, kind: str, step: int, layers: tuple[int, int], nodes: int) -> None:
        """Let every present site compute some nodes."""
        traced = np.flatnonzero(self.group == self.traced_group)  # none once site 0 has left
        starts = self.clock[traced, 0]
        self.clock += nodes * self.node_seconds
        for start, end in zip(starts, self.clock[traced, 0], strict=True):
            self.intervals.append(Interval(kind, step, layers, float(start), float(end)))

    def forward(self, step: int, arrivals: list[tuple[int, np.ndarray]]) -> None:
        """The forward of all layers; a layer with an arrival waits for it."""
        done = 0
        for layer, arrival in sorted(arrivals, key=lambda wait: wait[0]):
            if layer - 1 > done:
                self.compute("forward", step, (done + 1, layer - 1), layer - 1 - done)
                done = layer - 1
            np.maximum(self.clock, arrival, out=self.clock)
        self.compute("forward", step, (done + 1, self.workload.layers), self.workload.layers - done)

    def backward(self, step: int, transfers: Sequence[Transfer], ring: Ring) -> None:
        """The backward of all layers, and the reductions that it releases."""
        for nodes, layer, transfer in self.releases(transfers):
            ready = (self.clock + nodes * self.node_seconds).max(axis=0)
            start = np.maximum(ready, self.link_free)
            payload_bytes = transfer.bytes_per_parameter * self.workload.parameters_per_layer
            self.link_free = start + ring.link_seconds(payload_bytes, self.bits_per_second)
            self.last_arrival = self.link_free + ring.delay_seconds
            self.intervals.append(Interval("transfer", step, (layer, layer), float(start[0]), float(self.link_free[0])))
            needed_by = (step + transfer.delay_steps) * self.workload.microbatches
            self.waits[needed_by].append((layer, self.last_arrival))
        self.compute("backward", step, (1, self.workload.layers), 2 * self.workload.layers - 1)

    def releases(self, transfers: Sequence[Transfer]) -> list[tuple[int, int, Transfer]]:
        """(nodes of backward until ready, layer, transfer) in the order of the link's queue."""
        layers = self.workload.layers
        end = 2 * layers - 1
        found = [
            (end if transfer.after_pass else min(2 * (layers - layer + 1), end), layer, transfer)
            for transfer in transfers
            for layer in transfer.layers
        ]
        return sorted(found, key=lambda release: release[0])

    def keep(self, present: np.ndarray) -> None:
        """Forget the groups that have left."""
        self.group, self.node_seconds = self.group[present], self.node_seconds[present]
        self.clock = self.clock[present]


def simulate(
    workload: Workload, transfers: Sequence[Transfer], fleet: Fleet, gbit_per_second: np.ndarray, steps: int
) -> Run:
    """Run `steps` steps of a schedule and drain the link.

    Args:
        workload: what a site computes in a step.
        transfers: the schedule.
        fleet: the sites and their links.
        gbit_per_second: [bandwidth] nominal bandwidths between sites.
        steps: steps to take.
    """
    kinds, group_of_site = np.unique(
        np.stack([fleet.slowness, fleet.leaves_at_step.astype(float)]), axis=1, return_inverse=True
    )
    slowness, leaves_at_step = kinds
    groups, bandwidths = len(slowness), len(gbit_per_second)
    by_pass = defaultdict(list)
    for transfer in transfers:
        by_pass[transfer.step, transfer.microbatch].append(transfer)
    timeline = _Timeline(
        workload=workload,
        bits_per_second=np.asarray(gbit_per_second, dtype=float) * 1e9,
        group=np.arange(groups),
        node_seconds=workload.node_seconds * slowness[:, None],
        clock=np.zeros((groups, bandwidths)),
        link_free=np.zeros(bandwidths),
        last_arrival=np.zeros(bandwidths),
        traced_group=int(group_of_site[0]),
    )
    left_at = np.zeros((groups, bandwidths))
    sent_bytes = np.zeros(groups)
    ring = fleet.ring_at_step(1)
    for step in range(1, steps + 1):
        present = leaves_at_step[timeline.group] > step
        if not present.all():
            left_at[timeline.group[~present]] = timeline.clock[~present]
            timeline.keep(present)
            ring = fleet.ring_at_step(step)
        if ring.sites == 0:
            break
        for microbatch in range(1, workload.microbatches + 1):
            arrivals = timeline.waits.pop((step - 1) * workload.microbatches, []) if microbatch == 1 else []
            timeline.forward(step, arrivals)
            sent = by_pass[step, microbatch] if ring.sites > 1 else []
            timeline.backward(step, sent, ring)
            payload = sum(t.bytes_per_parameter * len(t.layers) for t in sent) * workload.parameters_per_layer
            sent_bytes[timeline.group] += ring.sent_bytes(payload)
    total = np.maximum(np.vstack([timeline.clock, left_at]).max(axis=0), timeline.last_arrival)
    left_at[timeline.group] = total
    steps_taken = np.clip(leaves_at_step - 1, 0, steps)
    compute = steps_taken * workload.microbatches * workload.nodes_per_pass * workload.node_seconds * slowness
    return Run(compute[group_of_site], left_at[group_of_site], total, sent_bytes[group_of_site], timeline.intervals)
