"""The base of methods whose replicas train separately."""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gregale.audit.estimate import bytes_on_device
from gregale.axes.layout import EMBED, LORA_RANK, Layout, is_named, vmap_over
from gregale.axes.parameters import trainable
from gregale.errors import UserError
from gregale.methods.inspection import Inspected, Probe
from gregale.methods.method import Actions, Method, PsdpState, StepMetrics
from gregale.methods.psdp import Psdp
from gregale.methods.replicas import Replicas, sync_axis
from gregale.methods.spikes import Limits, SpikesConfig

Tree = Any


class Separate(Method):
    """A method whose replicas each make PSDP steps on their own rows of the batch, under vmap.

    - `inner`: the step of one replica; its layout is `layout.inside(axis)`
    - `layout`: the whole mesh
    """

    inner: Psdp
    layout: Layout

    @property
    def axis(self) -> str:
        """Return the axis whose indices train separately."""
        return sync_axis(self.layout)

    @property
    def step_layout(self) -> Layout:
        return self.inner.layout

    @property
    def spikes(self) -> SpikesConfig | None:
        return self.inner.spikes

    def inner_steps(self, states: PsdpState, batch: Tree, limits: Limits | None) -> tuple[PsdpState, StepMetrics]:
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows."""
        given = states, self.replicas.rows(batch), *([] if limits is None else [limits])
        return vmap_over(self.inner.step, self.axis, self.layout)(*given)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def outer_layout(self) -> Layout:
        """Return the layout whose `opt_state` also splits joined parameters over the axis, as the finest split."""
        split = [name for name in (EMBED, LORA_RANK) if name == EMBED or name in self.layout.opt_state]
        of_each = {name: (*self.layout.mesh_axes((name,), self.layout.opt_state), self.axis) for name in split}
        finest = {name: tuple(dict.fromkeys(axes)) for name, axes in of_each.items()}
        return replace(self.layout, opt_state={**self.layout.opt_state, **finest})

    @property
    def replicas(self) -> Replicas:
        """Return the separate replicas."""
        return Replicas(self.layout, self.step_layout, self.outer_layout, self.axis)

    def init(self, model: Tree | None = None) -> Any:
        """Return the state before the first step, in which all replicas are equal."""
        return self.from_psdp(self.inner.init(model), 0)

    def inspected(self, state: Any, batch: Tree, probe: Probe) -> Inspected:
        own = partial(self.inner.inspected, probe=probe)
        return vmap_over(own, self.axis, self.layout)(state.inner, self.replicas.rows(batch))


def same_form(found: Tree, expected: Tree) -> bool:
    """Return whether two trees have the same structure, and arrays of the same axes, shapes and dtypes."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(jnp.shape(one) == jnp.shape(other) and one.dtype == other.dtype for one, other in pairs)


class MixingState(NamedTuple):
    """The state of a `Mixing` method between steps."""

    inner: PsdpState  # every array with a leading [replica]: parameters and optimizer state of each replica
    own: Tree = None  # the method's own state, see `Mixing.begin`


class Mixing(Separate, ABC):
    """A method whose replicas mix their parameters after a step.

        theta_k    = step(theta_k, rows of replica k)
        theta, own = mix(theta, own, due(t))            unless due(t) is None

    A subclass is a dataclass with the fields `inner` and `layout`, a `name`, and the methods `due`, `mix` and
    `bytes_sent`; `begin` gives it a state of its own. Evaluation, samples, export and the conversion to PSDP use
    `joined` parameters, by default the average of the replicas. Checkpoints hold these too, so that one device can
    evaluate them.
    """

    shown: ClassVar[tuple[str, ...]] = ("replica_bytes",)

    @abstractmethod
    def due(self, step: int) -> Any:
        """Return the argument of `mix` after step number `step`, a tree of arrays; None: nothing is mixed."""

    def begin(self, parameters: Tree) -> Tree:
        """Return the method's own state before the first step, from the parameters of all replicas, [replica, ...].

        Named arrays with the axis of the replicas lie with their replica, others are split as finely as `opt_state`
        splits them. A conversion to another method drops this state.
        """
        del parameters

    @abstractmethod
    def mix(self, parameters: Tree, own: Tree, due: Any) -> tuple[Tree, Tree]:
        """Return the parameters of all replicas, [replica, ...] each, and the own state, after they are mixed.

        It is compiled with the step. `self.replicas.average` averages a tree [replica, ...], and `copies` inverts it.
        """

    def joined(self, parameters: Tree, own: Tree) -> Tree:
        """Return one model's parameters [...] for all replicas' parameters [replica, ...] and the own state."""
        del own
        return self.replicas.average(parameters)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of a replica's parameters on one device, for `bytes_sent`."""
        layout = self.step_layout
        return bytes_on_device(layout.abstract(trainable(self.inner.model), layout.params))

    def from_psdp(self, start: PsdpState, step: Any) -> MixingState:
        del step
        inner = self.replicas.copies(start._replace(error=None))
        return MixingState(inner, self.begin(inner.parameters))

    def to_psdp(self, state: MixingState) -> PsdpState:
        joined = self.joined(state.inner.parameters, state.own)
        found, wanted = (jax.tree.structure(tree, is_leaf=is_named) for tree in (joined, state.inner.parameters))
        if found != wanted:
            raise UserError(f"sync.type: {type(self).__name__}.joined has to return one model's parameters.")
        return self.replicas.joined(state.inner, joined)

    def shardings(self, state: MixingState) -> MixingState:
        return MixingState(self.replicas.shardings(state.inner), self.replicas.shardings_of_any(state.own))

    def actions(self, step: int) -> Actions:
        due = self.due(step)
        if not all(
            isinstance(leaf, int | float | np.generic | np.ndarray | jax.Array) for leaf in jax.tree.leaves(due)
        ):
            raise UserError(f"sync.type: {type(self).__name__}.due has to return arrays or None; it returns {due!r}.")
        return Actions((due,))

    def step(
        self, state: MixingState, batch: Tree, due: Any = None, limits: Limits | None = None
    ) -> tuple[MixingState, StepMetrics]:
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows."""
        inner, metrics = self.inner_steps(state.inner, batch, limits)
        if due is None:
            return MixingState(inner, state.own), metrics
        given = inner.parameters, state.own
        mixed = self.mix(*given, due)
        if not (isinstance(mixed, tuple) and same_form(mixed, given)):
            raise UserError(
                f"sync.type: {type(self).__name__}.mix has to return the pair (parameters, own state), each array with "
                "the axes and the dtype that it was given with; `self.replicas.copies` turns [...] into [replica, ...]."
            )
        return MixingState(inner._replace(parameters=mixed[0]), mixed[1]), metrics

    def reset_error(self, state: MixingState) -> MixingState:
        return state

    def without_error(self, state: MixingState) -> MixingState:
        return state

    def trees(self, state: MixingState) -> dict[str, Tree]:
        found = {"parameters": state.inner.parameters, "optimizer": (state.inner.sharded, state.inner.gathered)}
        return found if state.own is None else {**found, "own": state.own}

    def eval_model(self, state: MixingState) -> Tree:
        return self.inner.eval_model(self.to_psdp(state))

    def eval_subset(self, state: MixingState) -> MixingState:
        return MixingState(self.inner.eval_subset(state.inner), state.own)

    def needs_full_state(self, step: int) -> bool:
        del step
        return True
