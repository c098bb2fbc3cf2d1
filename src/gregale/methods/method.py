"""The one face of synchronisation methods: what programs ask of a method, so that none asks what kind it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from gregale.audit.step import StepShape
from gregale.audit.traffic import Transfer
from gregale.axes.layout import Layout
from gregale.methods.inspection import Inspected, Probe

Tree = Any


class StepMetrics(NamedTuple):
    """What a step measures: scalars, or [replica] where each replica makes a step of its own."""

    loss: Any  # float32: sum of losses / sum of weights, over the whole batch
    weight: Any  # float32: sum of weights, the tokens that counted
    grad_norm: Any  # float32: global norm of the averaged gradient, before clipping
    finite: Any  # bool: whether loss and gradient were finite; if not, the step changed nothing
    outer: Any = None  # the `PseudoGradient` that was sent, if one was


class Actions(NamedTuple):
    """What a step does beside its update."""

    during: tuple = ()  # further arguments of the compiled step
    after: Any = None  # argument of the compiled `synchronise` that follows it; None: nothing follows


class PsdpState(NamedTuple):
    """What PSDP carries from step to step, and the form in which one method's state becomes another's."""

    parameters: Tree  # under `params`
    sharded: Tree  # the optimizer's state, under `opt_state`
    gathered: Tree  # state of the optimizer's second part: scalars
    error: Tree = None  # what quantised averages have not sent yet; None if averages are exact


class StepKind(NamedTuple):
    """A kind of steps that do more than their update, by one of them."""

    step: int  # the number of a step of this kind, of those the one that sends most
    transfers: list[Transfer]  # the transfers of its phases, in closed form


class Traffic(Protocol):
    """What a method sends, in closed form, for a model of some sizes."""

    @property
    def averages(self) -> list[Transfer] | None:
        """What each step sends to average gradients, take their norm and give updates back; None: float32."""
        ...

    @property
    def period(self) -> int:
        """Steps after which what is sent repeats."""
        ...

    def kinds(self) -> Mapping[str, StepKind]:
        """By the name of its program, each kind of steps that do more than their update."""
        ...

    def joins(self) -> list[Transfer]:
        """What a period's steps send beside their updates, all together."""
        ...

    def bytes_a_step(self) -> tuple[float, float]:
        """What a device sends over the slow axis for the parameters: average of a period, and largest step."""
        ...


class Method(Protocol):
    """A synchronisation method: which trees carry `replica`, and when they are reduced.

    A state is the method's own, a tree of arrays; programs hand it on and never look into it. Methods that compute with
    states are called under `jax.jit`; those that take the number of a step, counted from 1, are plain Python.
    """

    name: ClassVar[str]  # as checkpoints note it
    shown: ClassVar[tuple[str, ...]]  # which figures of its traffic belong into a progress line

    @property
    def layout(self) -> Layout:
        """The whole mesh and the mappings."""
        ...

    @property
    def step_layout(self) -> Layout:
        """The layout as one step sees it: all of it, or one replica's part."""
        ...

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes of the step's metrics: none, or the one whose indices each make a step of their own."""
        ...

    # A step.

    def init(self, model: Tree | None = None) -> Tree:
        """The state before the first step, from the arrays of a model (default: the method's own)."""
        ...

    def shardings(self, state: Tree) -> Tree:
        """Where each array of a state lives."""
        ...

    def actions(self, step: int) -> Actions:
        """What step number `step` does beside its update."""
        ...

    @property
    def step(self) -> Callable[..., tuple[Tree, StepMetrics]]:
        """step(state, batch, *during): one step on a batch; `during` as `actions` says."""
        ...

    def synchronise(self, state: Tree, after: Any) -> tuple[Tree, Any]:
        """What follows a step for which `actions` has an `after`: the state, and the metrics' `outer`."""
        ...

    # From one method to another.

    def from_psdp(self, start: PsdpState, step: Any) -> Tree:
        """The state that goes on from a PSDP state after `step` steps, with no error of quantised averages yet."""
        ...

    def to_psdp(self, state: Tree) -> PsdpState:
        """The PSDP state that goes on from a state, without an error of quantised averages."""
        ...

    def reset_error(self, state: Tree) -> Tree:
        """A state of any mesh and codec with no error of quantised averages yet."""
        ...

    def without_error(self, state: Tree) -> Tree:
        """A state without the errors of quantised averages, which are cut as the mesh is."""
        ...

    # What is evaluated, sampled and handed over.

    def eval_model(self, state: Tree) -> Tree:
        """The model that is evaluated."""
        ...

    def eval_subset(self, state: Tree) -> Tree:
        """The part of a state that `trained` needs after a step that is not `due`; the rest is None."""
        ...

    def needs_full_state(self, step: int) -> bool:
        """Whether the parameters of `end` depend on more than `parameters_only` after `step` steps.

        A checkpoint then holds them too, so that one device can evaluate it.
        """
        ...

    # Figures, and what `gregale plan` tells.

    def bytes_sent(self, step: int) -> int:
        """Bytes that a device has sent over the slow axis in the first `step` steps, for parameters."""
        ...

    def metrics(self, step: int) -> dict[str, int]:
        """What else there is to tell after `step` steps: where replicas train apart, `steps_since_sync`."""
        ...

    def inspected(self, state: Tree, batch: Tree, probe: Probe) -> Inspected:
        """What the next step computes with, for a program of its own; `probe` is for the layout `inside`."""
        ...

    def trees(self, state: Tree) -> dict[str, Tree]:
        """The trees that a state holds, by name: `parameters`, `optimizer`, and those that are the method's own."""
        ...

    def traffic(self, step: StepShape) -> Traffic:
        """What the method sends, in closed form, for a model of these sizes."""
        ...


@runtime_checkable
class Lossy(Protocol):
    """A method of which it can be measured what its codec loses: all of it is on the devices."""

    def lost(self, state: Tree, batch: Tree) -> Any:
        """What quantising would lose, as `communication.quantised.Lost`; only with a codec."""
        ...
