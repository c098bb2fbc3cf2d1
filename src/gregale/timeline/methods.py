"""Provides the methods as schedules: the layers, step and bytes of each transfer, and the step that waits for it.

Steps count from 1, layers from 1 (nearest the input), fragments from 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gregale.codecs.codec import CODECS, WireFormat, wire_format
from gregale.errors import UserError
from gregale.timeline.model import Workload

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

    def bytes_per_parameter(self, codec: str | None = None) -> float:
        """Return the mean bytes of a parameter in the two halves of its reduction, with a codec or the default."""
        scattered = PAYLOADS[codec or self.codec].bytes_per_parameter
        gathered = PAYLOADS[self.gather_codec].bytes_per_parameter if self.gather_codec else scattered
        return (scattered + gathered) / 2


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
