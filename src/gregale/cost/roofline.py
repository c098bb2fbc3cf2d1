"""Provides the roofline of a step: the minimum time of its work on a chip and its links."""

from collections.abc import Mapping
from dataclasses import dataclass

from gregale.cost.chips import EIGHT_BIT, Chip
from gregale.cost.collectives import BETWEEN, INSIDE


@dataclass(frozen=True)
class DeviceWork:
    """Work of one device in a step.

    Attributes:
        model_flops: FLOPs of the model alone, with the pairs that the mask leaves (`programs.runtime.model_flops`).
        full_flops: the same with all pairs of a query and a key.
        flops: FLOPs of the step's program, so without products that an attention kernel skips, with recomputation in
            the backward pass, the loss's padding, idle stages of a pipeline, and the optimizer's products.
        memory_bytes: minimum bytes read from or written to the device's memory.
        link_bytes: bytes that the device sends over each link.
        host_bytes: bytes moved to the host's memory and back.
        eight_bit_flops: those of `flops` in products of 8-bit numbers (`compute.matmul`).
    """

    model_flops: float
    full_flops: float
    flops: float
    memory_bytes: float
    link_bytes: Mapping[str, float]
    host_bytes: float = 0.0
    eight_bit_flops: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step needs for each resource alone, at its peak.

    `model` are those of the model's FLOPs with the visible pairs, `full` those with all pairs.
    """

    compute: float
    memory: float
    links: Mapping[str, float]
    model: float
    host: float = 0.0
    full: float = 0.0

    @property
    def overlapped(self) -> float:
        """Return the time of a step with full overlap: that of the slowest resource."""
        return max(self.compute, self.memory, self.host, *self.links.values())

    def utilisation(self, seconds: float) -> dict[str, float | None]:
        """Return the model FLOPs utilisation of a step of this length, as a share of the peak in bfloat16.

        - `utilisation`: with causal attention, so with the pairs that the mask leaves; at most 1 without 8-bit products
        - `utilisation_full_attention`: with all pairs, as in PaLM (arXiv 2204.02311) and MaxText until 2025. None above
          1, which it reaches if a kernel skips most of them
        """
        full = self.full / seconds
        return {"utilisation": self.model / seconds, "utilisation_full_attention": full if full <= 1 else None}

    @property
    def one_after_another(self) -> float:
        """Return the time of a step without overlap, except of memory and compute."""
        return max(self.compute, self.memory) + sum(self.links.values()) + self.host


def link_rates(chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> dict[str, float]:
    """Return a device's send rate over each link with a known rate; arguments as for `roofline`."""
    rates = {INSIDE: chip.link_bytes_per_second / devices_a_chip}
    if between_bytes_per_second is not None:
        rates[BETWEEN] = between_bytes_per_second
    elif chip.network_bytes_per_second is not None:
        rates[BETWEEN] = chip.network_bytes_per_second / devices_a_chip
    return rates


def roofline(work: DeviceWork, chip: Chip, devices_a_chip: int, between_bytes_per_second: float | None) -> Roofline:
    """Return the seconds for each resource of a chip's device.

    - `between_bytes_per_second`: the device's send rate between slices; None: the chip's share of its network. A chip
      without a published network has no such time
    """
    peak = chip.flops_per_second / devices_a_chip
    rates = link_rates(chip, devices_a_chip, between_bytes_per_second)
    return Roofline(
        compute=(work.flops - work.eight_bit_flops * (1 - 1 / EIGHT_BIT)) / peak,
        memory=work.memory_bytes / (chip.memory_bytes_per_second / devices_a_chip),
        links={link: work.link_bytes.get(link, 0.0) / rate for link, rate in rates.items()},
        model=work.model_flops / peak,
        full=work.full_flops / peak,
        host=work.host_bytes / (chip.host_bytes_per_second / devices_a_chip),
    )
