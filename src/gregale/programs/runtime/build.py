"""Provides `set_up`, which builds the setup of a run, with its experts gathered or exchanged over `data`.

With `mapping.compute.experts: auto` closed forms of a step choose where experts lie (docs/experts.md). They depend on
the configuration and on the mesh alone, so that all commands choose alike.
"""

from dataclasses import dataclass, replace

from jax.sharding import Mesh

from gregale.axes.layout import EXCHANGED, EXPERTS
from gregale.cost.chips import chip, of_device
from gregale.cost.collectives import INSIDE
from gregale.cost.estimate import ACCELERATOR
from gregale.distributed.devices import GPU_MEMORY
from gregale.errors import UserError
from gregale.programs.plan import estimates
from gregale.programs.plan.devices import DEFAULT_CHIP, Target
from gregale.programs.plan.estimates import closed_form_seconds
from gregale.programs.runtime.setup import Setup, placed
from gregale.runs.config import TrainConfig


@dataclass(frozen=True)
class Figures:
    """A step in closed form: seconds, and a device's bytes at the peak and sent inside a replica, in one round."""

    seconds: float
    peak: int
    sent: int


@dataclass(frozen=True)
class ExpertPlacement:
    """Both places on devices of a chip with this memory; `refused` is the reason why experts cannot be exchanged."""

    chip: str
    memory: int
    gathered: Figures
    exchanged: Figures | None
    refused: str | None = None

    @property
    def exchanges(self) -> bool:
        """Return whether the exchange is the faster of those that fit, or the smaller if none does."""

        def cost(found: Figures) -> tuple[bool, float]:
            return (True, found.peak) if found.peak > self.memory else (False, found.seconds)

        return self.exchanged is not None and cost(self.exchanged) < cost(self.gathered)


def choice_of(gathered: Setup, exchanged: Setup | UserError) -> ExpertPlacement:
    """Return the choice between two setups."""
    target = target_of(gathered.layout.mesh)

    def figures(setup: Setup) -> Figures:
        trees = estimates.tree_bytes(setup)
        peak = estimates.estimate(setup, target.backend, trees).peak
        sent = estimates.sent_by_link(estimates.step_transfers(setup, ACCELERATOR), estimates.step_shape(setup))
        return Figures(closed_form_seconds(setup, target, None, trees), peak, int(sent[INSIDE]))

    own = target.chip.name, target.memory_bytes, figures(gathered)
    return (
        ExpertPlacement(*own, None, str(exchanged))
        if isinstance(exchanged, UserError)
        else ExpertPlacement(*own, figures(exchanged))
    )


def target_of(mesh: Mesh) -> Target:
    """Return the devices of a mesh with their chip; of an unknown kind, such as CPUs, with `DEFAULT_CHIP`."""
    devices = list(mesh.devices.flat)
    found, platform = of_device(devices[0].device_kind) or chip(DEFAULT_CHIP), devices[0].platform
    share = GPU_MEMORY if platform == "gpu" else 1.0
    return Target(devices, found, found.devices, simulated=platform == "cpu", share=share)


def set_up(config: TrainConfig, tokens: int, mesh: Mesh | None = None) -> Setup:
    """Return the setup of a configuration, without allocation or compilation.

    - `tokens`: the tokenizer's vocabulary size
    - `mesh`: default: the configured mesh on all devices

    Raises `UserError` for values that contradict one another.
    """
    if config.mapping.leaves_experts_open:
        gathered, exchanged = in_places(config, tokens, mesh)
        if isinstance(exchanged, Setup) and choice_of(gathered, exchanged).exchanges:
            return exchanged
        return gathered
    return placed(config, tokens, mesh)


def in_places(config: TrainConfig, tokens: int, mesh: Mesh | None) -> tuple[Setup, Setup | UserError]:
    """Return the setups of a configuration with its experts gathered and exchanged; for the second perhaps an error."""

    def one(place: str | None) -> Setup:
        mapping = replace(config.mapping, compute={**config.mapping.compute, EXPERTS: place})
        return replace(placed(replace(config, mapping=mapping), tokens, mesh), config=config)

    gathered = one(None)
    try:
        return gathered, one(EXCHANGED)
    except UserError as error:
        return gathered, error
