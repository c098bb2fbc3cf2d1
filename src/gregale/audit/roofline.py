"""The least time that a step can take: its work against what the chip and its links can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gregale.audit.chips import Chip
from gregale.audit.device_axes import BETWEEN, INSIDE
from gregale.audit.memory import offloaded_bytes
from gregale.audit.pallas_cost import visible
from gregale.audit.step import StepShape, values

FLOAT32 = 4
FORWARD, BACKWARD = 2, 4  # FLOPs for a weight and a token: a multiply-add, and two of them for both gradients
KERNEL_BACKWARD = 5 / 2  # products of a kernel's backward pass over those of its forward pass: it has no scores to read


@dataclass(frozen=True)
class Work:
    """What one device does in a step.

    Attributes:
        model_flops: of the model itself, by the closed form.
        flops: as computed: without what a kernel of attention leaves out, with what the backward pass computes again,
            idle stages of a pipeline, and the optimizer's matrix products.
        memory_bytes: read from or written to the device's memory, at the least.
        link_bytes: sent by the device over each link.
        host_bytes: moved to the host's memory and back.
    """

    model_flops: float
    flops: float
    memory_bytes: float
    link_bytes: Mapping[str, float]
    host_bytes: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step needs for each resource alone.

    Attributes:
        compute: at the chip's peak.
        memory: at its memory's bandwidth.
        links: over each link, at its bandwidth.
        mfu_bound: model FLOPs at the chip's peak over `overlapped`: the utilisation that cannot be exceeded. Above 1
            where a kernel leaves out so much of attention, which model FLOPs have in full.
        host: to the host's memory and back.
    """

    compute: float
    memory: float
    links: Mapping[str, float]
    mfu_bound: float
    host: float = 0.0

    @property
    def overlapped(self) -> float:
        """The time of a step in which everything runs at once: the slowest resource."""
        return max(self.compute, self.memory, self.host, *self.links.values())

    @property
    def one_after_another(self) -> float:
        """The time of a step in which nothing is overlapped, but that memory serves compute."""
        return max(self.compute, self.memory) + sum(self.links.values()) + self.host


def model_flops_per_token(step: StepShape) -> int:
    """`6 * N + 12 * layers * heads * head_size * positions`: forward and backward pass for one token.

    N are the weights that are multiplied, so without the embedding unless it is the head as well. Attention is counted
    in full, as in PaLM (arXiv 2204.02311), though a causal mask hides half of it.
    """
    return (FORWARD + BACKWARD) * (_multiplied(step) + step.positions * _for_a_key(step))


def work_of(step: StepShape, optimizer_bytes: int, link_bytes: Mapping[str, float], update_flops: float = 0.0) -> Work:
    """The work of one device in a step: products, and memory for weights, saved activations, gradients, the optimizer.

    - `optimizer_bytes`: of its state
    - `update_flops`: of the optimizer's matrix products
    """
    tokens = step.rows * step.positions / step.layout.mesh.size
    attention = FORWARD * _keys(step) * _for_a_key(step)
    backward = BACKWARD / FORWARD if step.scores else KERNEL_BACKWARD
    layers = (FORWARD + BACKWARD) * _stacked(step) + (1 + backward) * attention + _again(step, attention)
    single = (FORWARD + BACKWARD) * (_multiplied(step) - _stacked(step))
    idle = step.pipeline.drain / (step.pipeline.iterations - step.pipeline.drain) if step.pipeline else 0
    return Work(
        model_flops=model_flops_per_token(step) * tokens,
        flops=(single + (1 + idle) * layers) * tokens + update_flops,
        memory_bytes=_memory_bytes(step, optimizer_bytes),
        link_bytes=link_bytes,
        host_bytes=2 * step.microbatches * step.layers * offloaded_bytes(step),
    )


def _multiplied(step: StepShape) -> int:
    """The weights that are multiplied: without an embedding that is only looked up."""
    tables = [weight for weight in step.single() if any(axis.name == "vocab" for axis in weight.axes)]
    return step.parameters - (values(tables[0].axes) if len(tables) > 1 else 0)


def _stacked(step: StepShape) -> int:
    return sum(values(weight.axes) for weight in step.stacked())


def _for_a_key(step: StepShape) -> int:
    """Multiply-adds of attention for a query and a key, in all layers: their product, and a probability by a value."""
    return 2 * step.layers * step.heads * step.head_size


def _keys(step: StepShape) -> float:
    """Keys that a query is multiplied by, on average: a kernel leaves out what the mask hides."""
    return step.positions if step.scores else visible(step.positions, step.windows) / step.positions


def _again(step: StepShape, attention: float) -> float:
    """FLOPs for a token that the backward pass computes again, of all layers.

    Never the product that ends a layer, whose result nothing needs unless it is normalised; and of `attention`, which
    has `attention` FLOPs in the forward pass, half to have the scores again, where no kernel keeps what spares them.
    """
    scores = attention / 2 if step.scores else 0
    last = [weight for weight in step.stacked() if [axis.name for axis in weight.axes][-2:] == ["mlp", "embed"]]
    unneeded = 0 if step.norms_after else sum(values(weight.axes) for weight in last)
    products = FORWARD * (_stacked(step) - unneeded)
    match step.remat:
        case "none":
            return 0
        case "projections":
            return scores
        case "context" | "context_offload" | "attention":
            return products + scores
    return products + attention


def _memory_bytes(step: StepShape, optimizer_bytes: int) -> float:
    """In each microbatch weights are read in every pass, layers' inputs written and read, and buffers added to.

    What is there between a layer's operations is left out, under every policy: saved, it is only read once more.
    """
    gathered = sum(step.on_device(weight, step.layout.compute) for weight in step.weights)
    shard = sum(step.on_device(weight, step.layout.params) for weight in step.weights)
    passes = 3 if step.remat in ("none", "projections") else 4
    inputs = 2 * step.layers * step.tokens * step.embed * step.compute_bytes
    microbatch = passes * gathered * step.compute_bytes + 2 * shard * FLOAT32 + inputs
    return step.microbatches * microbatch + 2 * optimizer_bytes + 4 * shard * FLOAT32


def link_rates(chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> dict[str, float]:
    """What a device sends over each link in a second; arguments as of `roofline`. One without a figure is left out."""
    rates = {INSIDE: chip.link_bytes_per_second / devices_a_chip}
    if between_bytes_per_second is not None:
        rates[BETWEEN] = between_bytes_per_second
    elif chip.network_bytes_per_second is not None:
        rates[BETWEEN] = chip.network_bytes_per_second / devices_a_chip
    return rates


def roofline(work: Work, chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> Roofline:
    """Seconds for each resource.

    Args:
        work: of one device.
        chip: which shows as `devices_a_chip` devices, each with its part.
        devices_a_chip: JAX devices of a chip.
        between_bytes_per_second: what a device sends between slices; None: the chip's share of its network. A chip
            whose network is not published has no time for it.
    """
    peak = chip.flops_per_second / devices_a_chip
    rates = link_rates(chip, devices_a_chip, between_bytes_per_second)
    links = {link: work.link_bytes.get(link, 0.0) / rate for link, rate in rates.items()}
    found = Roofline(
        compute=work.flops / peak,
        memory=work.memory_bytes / (chip.memory_bytes_per_second / devices_a_chip),
        links=links,
        mfu_bound=0.0,
        host=work.host_bytes / (chip.host_bytes_per_second / devices_a_chip),
    )
    return replace(found, mfu_bound=work.model_flops / peak / found.overlapped)
