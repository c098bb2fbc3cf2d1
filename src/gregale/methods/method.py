"""The interface of synchronisation methods, so that no program depends on a method's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from gregale.audit.step import StepShape
from gregale.audit.traffic import Transfer
from gregale.axes.layout import Layout
from gregale.methods.inspection import Inspected, Probe

Tree = Any


class StepMetrics(NamedTuple):
    """The metrics of a step: scalars, or [replica] if each replica makes its own step."""

    loss: Any  # float32: sum of losses / sum of weights, over the whole batch
    weight: Any  # float32: sum of weights, the tokens that counted
    grad_norm: Any  # float32: global norm of the averaged gradient, before clipping
    finite: Any  # bool: whether loss and gradient were finite; if not, the step changed nothing
    outer: Any = None  # the `PseudoGradient` that was sent, if one was


class Actions(NamedTuple):
    """The actions of a step beside its update."""

    during: tuple = ()  # further arguments of the compiled step
    after: Any = None  # argument of the compiled `synchronise` after the step; None: no `synchronise`


class PsdpState(NamedTuple):
    """The state of PSDP between steps, and the form that converts one method's state to another's."""

    parameters: Tree  # under `params`
    sharded: Tree  # the optimizer's state, under `opt_state`
    gathered: Tree  # the state of the optimizer's second part: scalars
    error: Tree = None  # the unsent rest of quantised averages; None if averages are exact


class StepKind(NamedTuple):
    """A kind of steps with actions beside their update, described by one of them."""

    step: int  # the number of the step of this kind that sends most
    transfers: list[Transfer]  # of its phases, in closed form


class Traffic(Protocol):
    """The traffic of a method, in closed form, for a model of some sizes."""

    @property
    def averages(self) -> list[Transfer] | None:
        """Return each step's transfers to average gradients, take their norm and gather updates; None: float32."""
        ...

    @property
    def period(self) -> int:
        """Return the number of steps after which the transfers repeat."""
        ...

    def kinds(self) -> Mapping[str, StepKind]:
        """Return, by the name of its program, each kind of steps with actions beside their update."""
        ...

    def joins(self) -> list[Transfer]:
        """Return all transfers of a period's steps beside their updates."""
        ...

    def bytes_a_step(self) -> tuple[float, float]:
        """Return a device's bytes over the slow axis for the parameters: average and maximum of a step."""
        ...


class Method(Protocol):
    """A synchronisation method: the trees that carry `replica`, and the steps at which it is reduced.

    A state is the method's own tree of arrays; programs pass it on and never read it. Methods that compute with states
    are called under `jax.jit`; those that take the number of a step, counted from 1, are plain Python.
    """

    name: ClassVar[str]  # as checkpoints record it
    shown: ClassVar[tuple[str, ...]]  # the metrics of its traffic in a progress line

    @property
    def layout(self) -> Layout:
        """Return the whole mesh and the mappings."""
        ...

    @property
    def step_layout(self) -> Layout:
        """Return the layout of one step: all of it, or one replica's part."""
        ...

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Return the axes of the step's metrics: none, or the one whose indices make their own steps."""
        ...

    # A step.

    def init(self, model: Tree | None = None) -> Tree:
        """Return the state before the first step, from the arrays of a model (default: the method's own)."""
        ...

    def shardings(self, state: Tree) -> Tree:
        """Return the sharding of each array of a state."""
        ...

    def actions(self, step: int) -> Actions:
        """Return the actions of step number `step` beside its update."""
        ...

    @property
    def step(self) -> Callable[..., tuple[Tree, StepMetrics]]:
        """Return step(state, batch, *during), which runs one step on a batch; `during` is from `actions`."""
        ...

    def synchronise(self, state: Tree, after: Any) -> tuple[Tree, Any]:
        """Return the state, and the metrics' `outer`, after a step for which `actions` has an `after`."""
        ...

    # From one method to another.

    def from_psdp(self, start: PsdpState, step: Any) -> Tree:
        """Return the state that continues from a PSDP state after `step` steps, with a zero error."""
        ...

    def to_psdp(self, state: Tree) -> PsdpState:
        """Return the PSDP state that continues from a state, without an error of quantised averages."""
        ...

    def reset_error(self, state: Tree) -> Tree:
        """Return a state of any mesh and codec with a zero error of quantised averages."""
        ...

    def without_error(self, state: Tree) -> Tree:
        """Return a state without the errors of quantised averages, whose shapes depend on the mesh."""
        ...

    # Models for evaluation, sampling and export.

    def eval_model(self, state: Tree) -> Tree:
        """Return the model to evaluate."""
        ...

    def eval_subset(self, state: Tree) -> Tree:
        """Return the part of a state that `eval_model` needs unless `needs_full_state`; the rest is None."""
        ...

    def needs_full_state(self, step: int) -> bool:
        """Return whether the parameters of `to_psdp` depend on more than `eval_subset` after `step` steps.

        A checkpoint then holds them too, so that one device can evaluate it.
        """
        ...

    # Metrics, and estimates for `gregale plan`.

    def bytes_sent(self, step: int) -> int:
        """Return a device's bytes over the slow axis in the first `step` steps, for parameters."""
        ...

    def metrics(self, step: int) -> dict[str, int]:
        """Return further metrics after `step` steps: `steps_since_sync` if replicas train separately."""
        ...

    def inspected(self, state: Tree, batch: Tree, probe: Probe) -> Inspected:
        """Return the next step's values, in a separate program; `probe` is for the layout `step_layout`."""
        ...

    def trees(self, state: Tree) -> dict[str, Tree]:
        """Return the trees of a state by name: `parameters`, `optimizer`, and the method's own."""
        ...

    def traffic(self, step: StepShape) -> Traffic:
        """Return the method's traffic, in closed form, for a model of these sizes."""
        ...


@runtime_checkable
class Lossy(Protocol):
    """A method whose quantisation loss can be measured: all of it is on the devices."""

    def lost(self, state: Tree, batch: Tree) -> Any:
        """Return the quantisation loss, a `communication.quantised.QuantisationLoss`; only with a codec."""
        ...
