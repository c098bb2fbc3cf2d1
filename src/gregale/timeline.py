"""A simulation of a method's computation and transfers over time.

Steps count from 1, layers from 1 (nearest the input), fragments from 0.

The grid of bandwidths is the paper's (arXiv 2501.18512), and all are simulated at once.

All sites are equal and start together, so one compute resource and one link represent all of them. A pass is the
forward of layers 1 to L, then the backward of layers L to 1. A reduction starts when it is released and the link is
free (first in, first out), and the forwards that need it wait for its arrival. Nothing else waits, so all event times
follow from the schedule by additions and maxima.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gregale.codecs.codec import CODECS, WireFormat, wire_format
from gregale.errors import UserError


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


# Bytes of a parameter on the wire, by the name of the codec: the codecs' own formulas.
PAYLOADS = {
    "float32": wire_format("none"),
    **{codec: wire_format(codec) for codec in CODECS if codec != "none"},
    # The Streaming DiLoCo paper counts a quarter of bfloat16 and no scales.
    "4bit": WireFormat(bits=4),
}


@dataclass(frozen=True)
class Transfer:
    """Layers that are averaged over the sites after one pass."""

    step: int  # the step whose backward pass yields the values
    layers: tuple[int, ...]  # the layers, one reduction each
    bytes_per_parameter: float  # size on the wire, the mean of the reduction's two halves (scatter and gather)
    delay_steps: int = 0  # tau; the forward of a layer at step + 1 + tau waits for its reduction
    microbatch: int = 1  # the pass of that step, from 1
    after_pass: bool = False  # released at the end of the backward pass instead of after the layer's own node


@dataclass(frozen=True)
class Cadence:
    """The communication steps of a method. Raises `UserError` if a delay is not below the period."""

    steps: int = 100
    period_steps: int = 100  # H, steps between two reductions of one parameter (DiLoCo and streaming)
    fragment_layers: int = 3  # layers of one streaming fragment
    overlap_steps: int = 1  # tau of the overlapped streaming methods

    def __post_init__(self):
        if not 0 <= self.overlap_steps < self.period_steps:
            raise UserError(
                f"overlap_steps: {self.overlap_steps} must be at least 0 and below period_steps = {self.period_steps}, "
                "or a fragment would be sent again before it has arrived."
            )


Schedule = Callable[[Workload, Cadence, float], list[Transfer]]


def all_layers(workload: Workload) -> tuple[int, ...]:
    """Return every layer, in the order in which the backward pass finishes them."""
    return tuple(range(workload.layers, 0, -1))


def data_parallel(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send gradients of every layer after every pass: with microbatches, the conventional accumulation."""
    return [
        Transfer(step, all_layers(workload), bytes_per_parameter, microbatch=microbatch)
        for step in range(1, cadence.steps + 1)
        for microbatch in range(1, workload.microbatches + 1)
    ]


def psdp(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send gradient buffers of every layer once a step, at the end of the last microbatch.

    The buffers are summed in a loop over microbatches, so no layer is ready before the loop ends. Layer 1 is sent
    first, since the next forward needs it first.
    """
    layers = all_layers(workload)[::-1]
    return [
        Transfer(step, layers, bytes_per_parameter, microbatch=workload.microbatches, after_pass=True)
        for step in range(1, cadence.steps + 1)
    ]


def diloco(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send pseudo-gradients of every layer at every H-th step (arXiv 2311.08105)."""
    return [
        Transfer(step, all_layers(workload), bytes_per_parameter, microbatch=workload.microbatches)
        for step in range(cadence.period_steps, cadence.steps + 1, cadence.period_steps)
    ]


def streaming(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send one strided fragment at a time (arXiv 2501.18512).

    Of P = ceil(layers / fragment_layers) fragments, fragment i holds the layers l with (l - 1) mod P = i and is sent at
    the steps that are (i + 1) * floor(H / (P + 1)) into a period. Raises `UserError` if a period is too short for all
    fragments.
    """
    fragments = -(-workload.layers // cadence.fragment_layers)
    spacing = cadence.period_steps // (fragments + 1)
    if spacing == 0:
        raise UserError(
            f"period_steps: {cadence.period_steps} steps are too few for {fragments} fragments ({workload.layers} "
            f"layers, {cadence.fragment_layers} a fragment); use at least {fragments + 1} steps, or more layers a "
            "fragment."
        )
    transfers = []
    for period_start in range(0, cadence.steps, cadence.period_steps):
        for fragment in range(fragments):
            step = period_start + (fragment + 1) * spacing
            layers = tuple(l for l in all_layers(workload) if (l - 1) % fragments == fragment)
            if step <= cadence.steps:
                transfers.append(Transfer(step, layers, bytes_per_parameter, microbatch=workload.microbatches))
    return transfers


def streaming_overlap(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send as `streaming`; fragments are needed tau steps after they are sent."""
    return [
        Transfer(sent.step, sent.layers, sent.bytes_per_parameter, cadence.overlap_steps, sent.microbatch)
        for sent in streaming(workload, cadence, bytes_per_parameter)
    ]


def islands(workload: Workload, cadence: Cadence, bytes_per_parameter: float) -> list[Transfer]:
    """Send as `streaming` between islands; an island applies a fragment on arrival and waits for it at the next send.

    So a fragment may take the steps until then, floor(H / (P + 1)), whatever tau is.
    """
    sent = streaming(workload, cadence, bytes_per_parameter)
    spacing = sent[0].step if sent else 0
    return [replace(each, delay_steps=spacing, after_pass=True) for each in sent]


@dataclass(frozen=True)
class Method:
    """A schedule with its default codec."""

    schedule: Schedule  # the transfers, from a workload, a cadence and the bytes per parameter
    codec: str  # wire format, a name in `PAYLOADS`
    label: str  # name for tables
    gather_codec: str | None = None  # wire format of the second half, if it differs from the codec's

    def bytes_per_parameter(self, codec: str | None = None, each: int = 2) -> float:
        """Return the mean bytes of a parameter in the two halves of its reduction, with a codec or the default.

        - `each`: sites, if each sends whole messages to all others in place of two phases
        """
        scattered = PAYLOADS[codec or self.codec].bytes_per_parameter
        gathered = PAYLOADS[self.gather_codec].bytes_per_parameter if self.gather_codec else scattered
        return (scattered + gathered) / 2 * (each / 2 if self.joins_rounds else 1)

    @property
    def joins_rounds(self) -> bool:
        """Return whether sites join their parameters in rounds, and not their gradients in each step."""
        return self.schedule not in (data_parallel, psdp)


METHODS = {
    "data_parallel": Method(data_parallel, "bfloat16", "data-parallel"),
    "diloco": Method(diloco, "bfloat16", "DiLoCo"),
    "streaming": Method(streaming, "bfloat16", "Streaming DiLoCo"),
    "streaming_overlap": Method(streaming_overlap, "bfloat16", "Streaming DiLoCo, overlap"),
    "streaming_overlap_4bit": Method(streaming_overlap, "4bit", "Streaming DiLoCo, overlap, 4 bits"),
    "islands": Method(islands, "float32", "Islands, streaming"),
    "islands_4bit": Method(islands, "int4", "Islands, streaming, 4 bits"),
    # PSDP's optimizer takes the scattered gradients. The gathered values are its updates, which no codec encodes.
    "psdp": Method(psdp, "float32", "PSDP", gather_codec="float32"),
    "loco": Method(psdp, "int4", "PSDP with LoCo, 4 bits", gather_codec="float32"),
}
PAPER_METHODS = tuple(METHODS)[:5]


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
