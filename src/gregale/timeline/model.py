"""Provides the compute of one site, a stack of equal layers, and the ring of links between equal sites."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A model of equal layers, and the compute time of one step at a site.

    A step is `microbatches` passes. A pass has one node a layer for the forward, one for the backward with respect to
    activations (none for layer 1, below which nothing is trained), and one for the backward with respect to parameters.
    All nodes take the same time:

    node_seconds = step_seconds / (3 * layers * microbatches)

    Since layer 1 has one node fewer, a step computes for (1 - 1 / (3 * layers)) * step_seconds.
    """

    parameters: float  # of the whole model, spread evenly over the layers
    layers: int
    step_seconds: float  # nominal compute time of one optimizer step
    microbatches: int = 1

    @property
    def node_seconds(self) -> float:
        """Return the seconds of one node, the unit of the timeline."""
        return self.step_seconds / (3 * self.layers * self.microbatches)


# Sizes and step times as in Streaming DiLoCo (arXiv 2501.18512), Table 4.
PRESETS = {
    "1b": Workload(parameters=1e9, layers=24, step_seconds=0.1),
    "10b": Workload(parameters=10e9, layers=48, step_seconds=0.8),
    "100b": Workload(parameters=100e9, layers=108, step_seconds=4.9),
}


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce over equal sites.

    Each site sends 2 (n - 1) / n of the payload in 2 (n - 1) rounds, so

    link_seconds  = 2 (n - 1) / n * 8 * payload_bytes / bandwidth
    delay_seconds = 2 (n - 1) * latency_seconds

    The links are busy for link_seconds and the result arrives delay_seconds later. During the delay the links carry the
    next payload.
    """

    sites: int
    latency_seconds: float = 0.0  # delay of one message over one link

    def sent_bytes(self, payload_bytes: float) -> float:
        return 2 * (self.sites - 1) / self.sites * payload_bytes

    def link_seconds(self, payload_bytes: float, bits_per_second: np.ndarray) -> np.ndarray:
        """Return the seconds that a payload keeps the links busy, [bandwidth], at each bandwidth, [bandwidth]."""
        return 8 * self.sent_bytes(payload_bytes) / bits_per_second

    @property
    def delay_seconds(self) -> float:
        """Return the seconds from the end of the sending to the arrival."""
        return 2 * (self.sites - 1) * self.latency_seconds
