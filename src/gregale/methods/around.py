"""What methods share whose steps are those of PSDP, with a state around its state."""

from __future__ import annotations

from typing import Any, Protocol

from gregale.axes.layout import Layout
from gregale.methods.inspection import Inspected, Probe
from gregale.methods.method import Actions, PsdpState
from gregale.methods.psdp import Psdp

Tree = Any


class Around(Protocol):
    """A state with that of PSDP in it."""

    @property
    def psdp(self) -> PsdpState: ...


class AroundPsdp:
    """The part of a method's face that is its `inner` PSDP's."""

    inner: Psdp

    @property
    def layout(self) -> Layout:
        """The mesh and the mappings."""
        return self.inner.layout

    @property
    def inside(self) -> Layout:
        """All replicas make a step together."""
        return self.inner.inside

    @property
    def lanes(self) -> tuple[str, ...]:
        return self.inner.lanes

    def end(self, state: Around) -> PsdpState:
        """The PSDP state that goes on; what is around it is dropped."""
        return self.inner.end(state.psdp)

    def actions(self, step: int) -> Actions:
        """What step number `step` (from 1) does beside its update: nothing."""
        return self.inner.actions(step)

    def synchronise(self, state: Any, after: Any) -> tuple[Any, None]:
        """Nothing follows a step."""
        del after
        return state, None

    def trained(self, state: Around) -> Tree:
        """The model with the parameters that the next step computes with."""
        return self.inner.trained(state.psdp)

    def due(self, step: int) -> bool:
        """Whether what is evaluated depends on more than `parameters_only`: never."""
        return self.inner.due(step)

    def inspected(self, state: Around, batch: Tree, probe: Probe) -> Inspected:
        """What a step computes with, which is one of PSDP."""
        return self.inner.inspected(state.psdp, batch, probe)

    def figures(self, step: int) -> dict[str, int]:
        return self.inner.figures(step)
