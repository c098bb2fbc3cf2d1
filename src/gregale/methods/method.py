"""The interface of synchronisation methods, so that no program depends on a method's type."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

from gregale.audit.estimate import ParameterShape
from gregale.axes.layout import Layout
from gregale.errors import UserError
from gregale.methods.inspection import Inspected, Probe
from gregale.methods.spikes import SpikesConfig
from gregale.methods.traffic import DilocoTraffic, PsdpTraffic

Tree = Any


class StepMetrics(NamedTuple):
    """The metrics of a step: scalars, or [replica] if each replica makes its own step."""

    loss: Any  # float32: sum of losses / sum of weights, over the whole batch
    weight: Any  # float32: sum of weights, the tokens that counted
    grad_norm: Any  # float32: global norm of the averaged gradient, before clipping
    finite: Any  # bool: whether loss and gradient were finite; if not, the step changed nothing
    outer: Any = None  # the `PseudoGradient` that was sent, if one was
    named: Any = None  # float32, by name: auxiliary terms and metrics of `Losses`, each over the sum of weights
    callbacks: Any = None  # float32, by name: the metrics of callbacks
    spike: Any = None  # bool: whether the step changed nothing as a spike; None: spikes are no matter


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
    buffers: Tree = None  # the model's buffers, under `compute`; None if it has none


class Method(ABC):
    """A synchronisation method: the trees that carry `replica`, and the steps at which it is reduced.

    Its own code is that of a method whose replicas make every step together, with nothing beside the update.

    A state is the method's own tree of arrays; programs pass it on and never read it. Methods that compute with states
    are called under `jax.jit`; those that take the number of a step, counted from 1, are plain Python.
    """

    name: ClassVar[str]  # as checkpoints record it
    shown: ClassVar[tuple[str, ...]] = ()  # the metrics of its traffic in a progress line
    layout: Layout  # the whole mesh and the mappings
    step: Callable[..., tuple[Tree, StepMetrics]]
    """step(state, batch, *during): one step on a batch; `during` is from `actions`.

    With `spikes` it has an argument `limits` too, `gregale.methods.spikes.Limits`.
    """

    @property
    def spikes(self) -> SpikesConfig | None:
        """Return the rule of the steps that it leaves out as spikes; None: it leaves out none."""
        return None

    @property
    def step_layout(self) -> Layout:
        """Return the layout of one step: all of it, or one replica's part."""
        return self.layout

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Return the axes of the step's metrics: none, or the one whose indices make their own steps."""
        return ()

    def frozen(self, model: Tree) -> Tree:
        """Return the weights of a model before the first step that nothing trains; None: it has none.

        They are those beside adapters, or the copy with which an objective compares.
        """
        return self.inner.frozen(model)  # type: ignore

    def holding(self, frozen: Tree) -> Self:
        """Return the method with these values of the frozen weights, under `params`; None: it has none.

        The weights are shared by all replicas, and belong to no state of a method.
        """
        return self if frozen is None else replace(self, inner=self.inner.holding(frozen))  # type: ignore

    # A step.

    @abstractmethod
    def init(self, model: Tree | None = None) -> Tree:
        """Return the state before the first step, from the arrays of a model (default: the method's own)."""

    @abstractmethod
    def shardings(self, state: Tree) -> Tree:
        """Return the sharding of each array of a state."""

    def actions(self, step: int) -> Actions:
        """Return the actions of step number `step` beside its update."""
        del step
        return Actions()

    def synchronise(self, state: Tree, after: Any) -> tuple[Tree, Any]:
        """Return the state, and the metrics' `outer`, after a step for which `actions` has an `after`."""
        del after
        return state, None

    # From one method to another.

    @abstractmethod
    def from_psdp(self, start: PsdpState, step: Any) -> Tree:
        """Return the state that continues from a PSDP state after `step` steps, with a zero error."""

    @abstractmethod
    def to_psdp(self, state: Tree) -> PsdpState:
        """Return the PSDP state that continues from a state, without an error of quantised averages."""

    @abstractmethod
    def reset_error(self, state: Tree) -> Tree:
        """Return a state of any mesh and codec with a zero error of quantised averages."""

    @abstractmethod
    def without_error(self, state: Tree) -> Tree:
        """Return a state without the errors of quantised averages, whose shapes depend on the mesh."""

    # Models for evaluation, sampling and export.

    @abstractmethod
    def eval_model(self, state: Tree) -> Tree:
        """Return the model to evaluate."""

    @abstractmethod
    def eval_subset(self, state: Tree) -> Tree:
        """Return the part of a state that `eval_model` needs unless `needs_full_state`; the rest is None."""

    def needs_full_state(self, step: int) -> bool:
        """Return whether the parameters of `to_psdp` depend on more than `eval_subset` after `step` steps.

        A checkpoint then holds them too, so that one device can evaluate it.
        """
        del step
        return False

    # Metrics, and estimates for `gregale plan`.

    @abstractmethod
    def bytes_sent(self, step: int) -> int:
        """Return a device's bytes over the slow axis in the first `step` steps, for parameters."""

    def metrics(self, step: int) -> dict[str, int]:
        """Return further metrics after `step` steps: `steps_since_sync` if replicas train separately."""
        del step
        return {}

    @abstractmethod
    def inspected(self, state: Tree, batch: Tree, probe: Probe) -> Inspected:
        """Return the next step's values, in a separate program; `probe` is for the layout `step_layout`."""

    @abstractmethod
    def trees(self, state: Tree) -> dict[str, Tree]:
        """Return the trees of a state by name: `parameters`, `optimizer`, and the method's own."""

    def traffic(self, step: ParameterShape) -> PsdpTraffic | DilocoTraffic | None:
        """Return the method's traffic in closed form, for parameters of these sizes; None if it has no closed form."""
        del step
        return None

    def quantisation_loss(self, state: Tree, batch: Tree) -> Any:
        """Return the quantisation loss, a `communication.quantised.QuantisationLoss`; only with a codec.

        An island has none: a part of it is not on the devices. Raises `UserError` for a method without codecs.
        """
        raise UserError(f"reduce.measure is true, but the method {self.name} uses no codec. Leave reduce.measure out.")
