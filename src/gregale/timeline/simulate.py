"""The timeline itself: event times of compute and transfers, exact, for all bandwidths at once.

One compute resource a site and one link that all sites share as a ring. A pass is the forward of layers 1 to L, then
the backward of layers L to 1. A reduction starts when every present site has released it and the link is free (first
in, first out), and the forwards that need it wait for its arrival. Nothing else waits, so all event times follow from
the schedule by additions and maxima; no clock is stepped.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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


class _Timeline:
    """Where everybody is. Sites of equal pace that leave together move in lockstep and are one group."""

    def __init__(self, workload: Workload, pace: np.ndarray, gbit_per_second: np.ndarray, traced_group: int):
        groups, bandwidths = len(pace), len(gbit_per_second)
        self.workload = workload
        self.bits_per_second = np.asarray(gbit_per_second, dtype=float) * 1e9
        self.traced_group = traced_group
        self.group = np.arange(groups)  # [present group] its number
        self.node_seconds = workload.node_seconds * pace[:, None]  # [present group, 1]
        self.clock = np.zeros((groups, bandwidths))  # [present group, bandwidth]
        self.present_seconds = np.zeros((groups, bandwidths))  # of the groups that have left
        self.sent_bytes = np.zeros(groups)
        self.link_free = np.zeros(bandwidths)
        self.last_arrival = np.zeros(bandwidths)
        # By step: (layer, arrival [bandwidth]) that its forward waits for.
        self.waits: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self.intervals: list[Interval] = []

    def compute(self, kind: str, step: int, layers: tuple[int, int], nodes: int) -> None:
        """Let every present site compute some nodes."""
        traced = np.flatnonzero(self.group == self.traced_group)  # none once site 0 has left
        starts = self.clock[traced, 0]
        self.clock += nodes * self.node_seconds
        for start, end in zip(starts, self.clock[traced, 0], strict=True):
            self.intervals.append(Interval(kind, step, layers, float(start), float(end)))

    def forward(self, step: int) -> None:
        """The forward of all layers; a layer with an arrival due at this step waits for it."""
        done = 0
        for layer, arrival in sorted(self.waits.pop(step, []), key=lambda wait: wait[0]):
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
            self.sent_bytes[self.group] += ring.sent_bytes(payload_bytes)
            self.intervals.append(Interval("transfer", step, (layer, layer), float(start[0]), float(self.link_free[0])))
            arrival = self.link_free + ring.delay_seconds
            self.waits[step + 1 + transfer.delay_steps].append((layer, arrival))
            # The ring may have shrunk, so that a later reduction arrives before an earlier one.
            self.last_arrival = np.maximum(self.last_arrival, arrival)
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

    def leave(self, stays: np.ndarray) -> None:
        """Let all groups go but those that stay, [present group]."""
        self.present_seconds[self.group[~stays]] = self.clock[~stays]
        self.group, self.node_seconds, self.clock = self.group[stays], self.node_seconds[stays], self.clock[stays]

    def drain(self) -> np.ndarray:
        """Wait for the last reduction; the total time, [bandwidth]."""
        ends = np.vstack([self.clock, self.present_seconds, self.last_arrival])
        self.present_seconds[self.group] = ends.max(axis=0)
        return ends.max(axis=0)


def _groups(fleet: Fleet, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """What has to be simulated: [pace and leaving step, group], and the group of each site.

    Of the sites that stay to the end only the slowest matters: it is never earlier than the others (event times are
    sums and maxima, so they grow with the node times), and all of them are present until the same end. Site 0 is kept
    apart for its intervals.
    """
    pace = fleet.slowness.copy()
    stay = fleet.leaves_at_step > steps
    stay[0] = False
    if stay.any():
        pace[stay] = pace[stay].max()
    return np.unique(np.stack([pace, fleet.leaves_at_step.astype(float)]), axis=1, return_inverse=True)


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
    (pace, leaves_at_step), group_of_site = _groups(fleet, steps)
    by_pass = defaultdict(list)
    for transfer in transfers:
        by_pass[transfer.step, transfer.microbatch].append(transfer)
    timeline = _Timeline(workload, pace, gbit_per_second, traced_group=int(group_of_site[0]))
    ring = fleet.ring_at_step(1)
    for step in range(1, steps + 1):
        stays = leaves_at_step[timeline.group] > step
        if not stays.all():
            timeline.leave(stays)
            ring = fleet.ring_at_step(step)
        if ring.sites == 0:
            break
        for microbatch in range(1, workload.microbatches + 1):
            timeline.forward(step)
            timeline.backward(step, by_pass[step, microbatch] if ring.sites > 1 else [], ring)
    total_seconds = timeline.drain()
    nodes = np.clip(fleet.leaves_at_step - 1, 0, steps) * workload.microbatches * workload.nodes_per_pass
    return Run(
        compute_seconds=nodes * workload.node_seconds * fleet.slowness,
        present_seconds=timeline.present_seconds[group_of_site],
        total_seconds=total_seconds,
        sent_bytes=timeline.sent_bytes[group_of_site],
        intervals=timeline.intervals,
    )
