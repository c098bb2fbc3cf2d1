"""The least time that a step can take: its work against what the chip and its links can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gregale.audit.chips import Chip
from gregale.audit.placement import BETWEEN, INSIDE
from gregale.audit.step import StepShape, size_of, values

FLOAT32 = 4
FORWARD, BACKWARD = 2, 4  # FLOPs for a weight and a token: a multiply-add, and two of them for both gradients


@dataclass(frozen=True)
class Work:
    """What one device does in a step.

    Attributes:
        model_flops: of the model itself, by the closed form.
        flops: with what is computed a second time in the backward pass, and by idle stages of a pipeline.
        memory_bytes: read from or written to the device's memory, at the least.
        link_bytes: sent by the device over each link.
    """

    model_flops: float
    flops: float
    memory_bytes: float
    link_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step needs for each resource alone.

    Attributes:
        compute: at the chip's peak.
        memory: at its memory's bandwidth.
        links: over each link, at its bandwidth.
        mfu_bound: model FLOPs at the chip's peak over `overlapped`: the utilisation that cannot be exceeded.
    """

    compute: float
    memory: float
    links: Mapping[str, float]
    mfu_bound: float

    @property
    def overlapped(self) -> float:
        """The time of a step in which everything runs at once: the slowest resource."""
        return max(self.compute, self.memory, *self.links.values())

    @property
    def one_after_another(self) -> float:
        """The time of a step in which nothing is overlapped, but that memory serves compute."""
        return max(self.compute, self.memory) + sum(self.links.values())


def model_flops_per_token(step: StepShape) -> float:
    """`6 * N + 12 * layers * heads * head_size * positions`: forward and backward pass for one token.

    N are the weights that are multiplied, so without the embedding unless it is the head as well. Attention is counted
    in full, as in PaLM (arXiv 2204.02311), though a causal mask hides half of it.
    """
    tables = [weight for weight in step.single() if any(axis.name == "vocab" for axis in weight.axes)]
    looked_up = values(tables[0].axes) if len(tables) > 1 else 0
    return (FORWARD + BACKWARD) * (step.parameters - looked_up + attention_weights(step))


def attention_weights(step: StepShape) -> int:
    """Multiply-adds of attention for one token: queries by keys, and probabilities by values."""
    return 2 * step.layers * step.heads * step.head_size * step.positions


def work_of(step: StepShape, optimizer_bytes: int, link_bytes: Mapping[str, float]) -> Work:
    """The work of one device: products, and memory for weights, saved activations, gradients and the optimizer."""
    tokens = step.rows * step.positions
    devices = step.layout.mesh.size
    model_flops = model_flops_per_token(step) * tokens / devices
    head = size_of(step.weights, "embed") * size_of(step.weights, "vocab")
    forward = FORWARD * tokens / devices * (model_flops_per_token(step) / (FORWARD + BACKWARD) - head)
    again = {"none": 0.0, "projections": 0.2}.get(step.remat, 1.0)
    idle = step.pipeline.drain / (step.pipeline.iterations - step.pipeline.drain) if step.pipeline else 0.0
    return Work(
        model_flops=model_flops,
        flops=model_flops + (again + idle * (3 + again)) * forward,
        memory_bytes=_memory_bytes(step, optimizer_bytes),
        link_bytes=link_bytes,
    )


def _memory_bytes(step: StepShape, optimizer_bytes: int) -> float:
    gathered = sum(step.on_device(weight, step.layout.compute) for weight in step.weights)
    shard = sum(step.on_device(weight, step.layout.params) for weight in step.weights)
    passes = 3 if step.remat == "none" else 4
    saved = 2 * step.layers * step.tokens * step.embed * step.compute_bytes
    microbatch = passes * gathered * step.compute_bytes + 2 * shard * FLOAT32 + saved
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
    )
    return Roofline(found.compute, found.memory, links, work.model_flops / peak / found.overlapped)
