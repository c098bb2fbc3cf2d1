"""Provides the place of experts in a run: gathered, or exchanged over `data` (docs/experts.md, "Where experts lie").

With `mapping.compute.experts: auto` closed forms of a step choose it. They depend on the configuration and on the mesh
alone, so that all commands choose alike.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from gregale.audit.chips import chip, of_device
from gregale.axes.layout import EXPERTS, Layout
from gregale.axes.mapping import EXCHANGED
from gregale.distributed.devices import GPU_MEMORY
from gregale.errors import UserError
from gregale.programs.plan.devices import DEFAULT_CHIP, Target
from gregale.programs.plan.shapes import estimate, has_closed_forms, lacking, sent_inside, tree_bytes
from gregale.programs.plan.step_seconds import closed_form_seconds

if TYPE_CHECKING:
    from gregale.programs.runtime.setup import Setup


@dataclass(frozen=True)
class Figures:
    """A step in closed form with experts in one place: seconds, and bytes of a device.

    - `seconds`: see `gregale.programs.plan.step_seconds`, on the links of the devices, and with one round
    - `sent`: inside a replica
    """

    seconds: float
    peak: int
    sent: int


@dataclass(frozen=True)
class Choice:
    """The figures of each place, `gathered` and `exchanged`, on devices of a chip with this memory.

    - `refused`: the reason why experts cannot be exchanged; None: they can
    """

    chip: str
    memory: int
    figures: Mapping[str, Figures]
    refused: str | None

    @property
    def best(self) -> str:
        """Return the fastest place whose peak is within the memory; if there is none, that of the smallest peak."""

        def cost(place: str) -> tuple[bool, float]:
            peak = self.figures[place].peak
            return (True, peak) if peak > self.memory else (False, self.figures[place].seconds)

        return min(self.figures, key=cost)

    def to_dict(self, layout: Layout) -> dict[str, Any]:
        """Return the choice for JSON, and the place of a layout."""
        figures = {place: asdict(each) for place, each in self.figures.items()}
        return {"place": place_of(layout), "chip": self.chip, "refused": self.refused, **figures}


def choice_of(gathered: "Setup", exchanged: "Setup | UserError") -> Choice:
    """Return the choice between two setups, of which the second may be refused.

    Raises `UserError` if the model or the mapping has no closed forms.
    """
    if not has_closed_forms(gathered):
        raise UserError(
            f"mapping.compute.experts is auto, but {lacking(gathered)}, and these choose. Set it to null, so that "
            f"experts are gathered, or to {EXCHANGED}."
        )
    target = target_of(gathered.layout.mesh)
    refused = str(exchanged) if isinstance(exchanged, UserError) else None
    possible = {"gathered": gathered} | ({} if isinstance(exchanged, UserError) else {"exchanged": exchanged})
    figures = {place: figures_of(each, target) for place, each in possible.items()}
    return Choice(target.chip.name, target.memory_bytes, figures, refused)


def figures_of(setup: "Setup", target: Target) -> Figures:
    trees = tree_bytes(setup)
    seconds, peak = closed_form_seconds(setup, target, None, trees), estimate(setup, target.backend, trees).peak
    return Figures(seconds, peak, sent_inside(setup))


def place_of(layout: Layout) -> str:
    return "exchanged" if layout.mesh_axes((EXPERTS,), layout.compute) else "gathered"


def target_of(mesh: Mesh) -> Target:
    """Return the devices of a mesh with their chip; of an unknown kind, such as CPUs, with `DEFAULT_CHIP`."""
    devices = list(mesh.devices.flat)
    found, platform = of_device(devices[0].device_kind) or chip(DEFAULT_CHIP), devices[0].platform
    share = GPU_MEMORY if platform == "gpu" else 1.0
    return Target(devices, found, found.devices, simulated=platform == "cpu", share=share)
