"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (2501.18512): an outer optimizer joins separate replicas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.audit.estimate import ParameterShape
from gregale.axes.layout import Layout, Tree, vmap_over
from gregale.axes.parameters import buffers_of, layer_order, trainable
from gregale.codecs.codec import ReduceConfig
from gregale.communication.quantised import QuantisationLoss, QuantisedReducer
from gregale.communication.reduce import ExactReducer
from gregale.errors import UserError
from gregale.methods.agreement import PseudoGradient
from gregale.methods.fragments import FRAGMENT, Fragment, errors_per_fragment, per_fragment
from gregale.methods.method import Actions, PsdpState
from gregale.methods.outer import ExactOuter, OuterState, QuantisedOuter, pseudo_gradient, sending_layout
from gregale.methods.psdp import Psdp
from gregale.methods.replicas import sync_axis
from gregale.methods.round import Round, forget
from gregale.methods.schedule import Schedule
from gregale.methods.separate import Separate
from gregale.methods.spikes import Limits
from gregale.methods.traffic import DilocoTraffic
from gregale.optim.config import Optimizer


class DilocoState(NamedTuple):
    """The state of DiLoCo between steps."""

    inner: PsdpState  # every array with a leading [replica]: parameters and optimizer state of each replica
    outer: OuterState  # the outer parameters, and their optimizer's state
    seen: NamedArray  # [fragment, replica] float32: weight of the tokens since the fragment was last sent
    step: Any  # int32 scalar: steps done, which determine the fragment to send


@dataclass(frozen=True)
class Diloco(Separate):
    """DiLoCo on any Equinox module and loss (docs/diloco.md, "Algorithm").

    Each replica k makes the steps of `inner`, a PSDP step on its own rows of the batch, under vmap: nothing crosses
    the axis. After H steps, for each fragment f at its own offset,

        g            = theta_f - sum_k w_k theta_k,f / sum_k w_k          # SEND; w_k: tokens of replica k
        theta_f      = theta_f + outer(g)
        theta_k,f    = alpha theta_k,f + (1 - alpha) theta_f              # APPLY, tau steps later

    SEND is one reduce-scatter of the fragment over the axis, APPLY one all-gather. With tau >= 1 the SEND after step t
    is computed in the program of step t + 1, from that step's input, and the APPLY of step t + tau gathers theta_f in
    the program of that step: neither depends on the step's forward and backward pass, so the compiler can hide them
    behind it, each alone if tau >= 2. With tau = 0 both follow the step in a program of their own (`synchronise`).

    - `inner`: the step of one replica; its layout is `layout.inside(axis)`
    - `outer`: the outer optimizer, of optax; element-wise
    - `layout`: the whole mesh
    - `schedule`: H, P, tau, and which layers a fragment has
    - `mixing`: alpha, the weight of a replica's own parameters when a fragment is applied
    - `dropout`: probability that a fragment's synchronisation leaves a replica out, which continues from its own
      parameters
    - `seed`: of the dropout
    - `reduce`: the codecs of messages over the axis: pseudo-gradients in the first phase, outer updates in the second
    - `evaluate`: the parameters to evaluate: `outer`, `average` or `first_replica`
    """

    inner: Psdp
    outer: optax.GradientTransformation
    layout: Layout
    schedule: Schedule
    mixing: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    reduce: ReduceConfig = field(default=ReduceConfig())
    evaluate: str = "outer"

    name: ClassVar[str] = "diloco"
    shown: ClassVar[tuple[str, ...]] = ("replica_bytes", "steps_since_sync")

    @staticmethod
    def of(
        model: Tree,
        loss: Callable[[Any, Tree], tuple[jax.Array, jax.Array]],
        inner: optax.GradientTransformation,
        outer: optax.GradientTransformation,
        layout: Layout,
        schedule: Schedule,
        mixing: float = 0.0,
    ) -> "Diloco":
        """Return DiLoCo of any model and loss, with optax transformations that may work on shards.

        - `model`, `loss`: as for `Psdp`
        - `inner`: each replica's optimizer
        - `outer`, `layout`, `schedule`, `mixing`: as for the class

        Raises `UserError` if the schedule and the model have different numbers of layers.
        """
        layers = len(layer_order(model))
        if schedule.fragments > 1 and schedule.layers != layers:
            raise UserError(
                f"the schedule is for {schedule.layers} layers, but the model's arrays are stacked over {layers} on "
                f"the axis `layers`: Schedule(..., layers={layers}) would fit it."
            )
        step = Psdp(model, loss, Optimizer.of(inner), layout.inside(sync_axis(layout)))
        return Diloco(step, outer, layout, schedule, mixing)

    def from_psdp(self, start: PsdpState, step: Any = 0) -> DilocoState:
        """Return the state in which every replica continues from a PSDP state after `step` steps."""
        SyncAxis, fragments = self.layout.axis(self.axis), self.schedule.fragments
        start = start._replace(error=None)  # averages inside a replica are not quantised
        inner = self.replicas.copies(start)
        outer = self.outer_store.begin(start.parameters)
        outer = outer._replace(optimizer=per_fragment(self.outer, outer.optimizer, fragments))
        seen = hax.zeros((hax.Axis(FRAGMENT, fragments), SyncAxis))
        return self.reset_error(DilocoState(inner, outer, seen, jnp.full((), step, jnp.int32)))

    def reset_error(self, state: DilocoState) -> DilocoState:
        error = self.outer_store.reducer.init(state.outer.parameters)
        error = errors_per_fragment(error, self.schedule.fragments)
        return state._replace(outer=state.outer._replace(error=error))

    def without_error(self, state: DilocoState) -> DilocoState:
        return state._replace(outer=state.outer._replace(error=None))

    def to_psdp(self, state: DilocoState) -> PsdpState:
        """Return the PSDP state of the outer parameters, with averages of the replicas' optimizer states and buffers.

        It has no error of quantised averages; `Psdp.reset_error` adds one.
        """
        return self.replicas.joined(state.inner, self.outer_parameters(state))

    def shardings(self, state: DilocoState) -> DilocoState:
        seen = self.layout.shardings(state.seen, {self.axis: self.axis})
        inner, outer = self.replicas.shardings(state.inner), self.outer_store.shardings(state.outer)
        return DilocoState(inner, outer, seen, NamedSharding(self.layout.mesh, PartitionSpec()))

    def actions(self, step: int) -> Actions:
        schedule, due = self.schedule, self.schedule.fragments_at(step)
        if schedule.delay == 0:
            return Actions((None, None), Fragment.at(schedule, due.send, step))
        send = Fragment.at(schedule, due.send, step - 1)
        apply = Fragment.at(schedule, due.apply, step - schedule.delay)
        return Actions((send, apply))

    def step(
        self,
        state: DilocoState,
        batch: Tree,
        send: Fragment | None = None,
        apply: Fragment | None = None,
        limits: Limits | None = None,
    ):
        """Run one step of every replica on its rows of the batch; replica k has the k-th group of rows.

        - `send`: the fragment that was due after the step before; it is read from the input `state`
        - `apply`: the fragment that is due after this step
        """
        outer, measured = state.outer, None
        if send is not None:
            outer, measured = self.round.send(state.outer, state.inner.parameters, state.seen, send)
        # Read a fragment that was sent earlier from the input state, so that it waits for no send.
        arriving = outer if self.schedule.delay == 1 else state.outer
        inner, metrics = self.inner_steps(state.inner, batch, limits)
        if apply is not None:
            parameters, changed = self.round.apply(inner.parameters, arriving, apply)
            inner, outer = inner._replace(parameters=parameters), apply.put(outer, changed)
        seen = forget(state.seen, send) + NamedArray(metrics.weight, (self.axis,))
        return DilocoState(inner, outer, seen, state.step + 1), metrics._replace(outer=measured)

    def synchronise(self, state: DilocoState, after: Fragment) -> tuple[DilocoState, PseudoGradient]:
        """Run SEND and APPLY of a fragment at once (tau = 0)."""
        outer, measured = self.round.send(state.outer, state.inner.parameters, state.seen, after)
        parameters, changed = self.round.apply(state.inner.parameters, outer, after)
        inner, outer = state.inner._replace(parameters=parameters), after.put(outer, changed)
        return DilocoState(inner, outer, forget(state.seen, after), state.step), measured

    def quantisation_loss(self, state: DilocoState, batch: Tree) -> QuantisationLoss:
        """Return the quantisation loss of the replicas' differences from theta, all of them; as that of `Psdp`."""
        del batch
        reducer = self.outer_store.reducer
        assert isinstance(reducer, QuantisedReducer)

        def differences(own: Tree) -> Tree:
            return jax.tree.map(pseudo_gradient, state.outer.parameters, own)

        sums = vmap_over(differences, self.axis, self.layout)(state.inner.parameters)
        return reducer.measure(sums, jnp.float32(reducer.lanes), state.outer.error)

    def outer_parameters(self, state: DilocoState) -> Tree:
        """Return theta under `params` after a synchronisation of all fragments, which the state does not have.

        So every step up to the state's counts, in whatever reads it. A state of `eval_subset` is synchronised already.
        """
        outer = state.outer
        if state.inner is not None:
            outer = self.round.send_all(self.schedule, outer, state.inner.parameters, state.seen, state.step)
        return self.outer_store.parameters(outer)

    def bytes_sent(self, step: int) -> int:
        """Return the bytes that a device has sent over the axis in the first `step` steps, for parameters."""
        parameters = trainable(self.inner.model)
        total = 0
        for index in range(self.schedule.fragments):
            if fragment := Fragment.at(self.schedule, index, 0):
                part = jax.eval_shape(fragment.take, parameters)
                total += self.schedule.sends(index, step) * self.outer_store.reducer.bytes_sent(part)
        return total

    def metrics(self, step: int) -> dict[str, int]:
        return {"steps_since_sync": step - self.schedule.last_sent(step)}

    def trees(self, state: DilocoState) -> dict[str, Tree]:
        inner, outer = state.inner, state.outer
        return {
            "parameters": inner.parameters,
            "optimizer": (inner.sharded, inner.gathered),
            "outer_parameters": outer.parameters,
            "outer_optimizer": outer.optimizer,
        }

    def traffic(self, step: ParameterShape) -> DilocoTraffic:
        return DilocoTraffic(self.schedule, self.outer_store.reducer, self.outer_layout, step)

    def eval_model(self, state: DilocoState) -> Tree:
        """Return the model to evaluate: with the outer parameters, the plain average, or the first replica's."""
        if self.evaluate == "first_replica":
            return self.replica(state, 0)
        if self.evaluate == "average":
            parameters = self.replicas.average(state.inner.parameters)
        else:
            parameters = self.outer_parameters(state)
        buffers = None if state.inner is None else self.replicas.joined_buffers(state.inner)
        return self.inner.model_with(parameters, buffers)

    def eval_subset(self, state: DilocoState) -> DilocoState:
        if self.evaluate != "outer":
            return DilocoState(self.inner.eval_subset(state.inner), None, None, None)  # type: ignore[arg-type]
        outer = OuterState(state.outer.parameters, None, state.outer.pending)
        return DilocoState(None, outer, None, None)  # type: ignore[arg-type]

    def needs_full_state(self, step: int) -> bool:
        """Return whether replicas have buffers, or steps that the outer parameters of `eval_subset` lack."""
        schedule = self.schedule
        is_joined = schedule.fragments == 1 and schedule.delay == 0 and schedule.sent(step) is not None
        return not is_joined or buffers_of(self.inner.model) is not None

    def replica(self, state: DilocoState, index: int) -> Tree:
        inner = state.inner
        return self.inner.model_with(*(self.replicas.one(tree, index) for tree in (inner.parameters, inner.buffers)))

    @property
    def round(self) -> Round:
        """Return the operations that send and apply a fragment."""
        return Round(self.layout, self.outer_layout, self.outer_store, self.mixing, self.dropout, self.seed)

    @property
    def outer_store(self) -> ExactOuter | QuantisedOuter:
        """Return the store of the outer parameters, which also sends them."""
        layout = self.outer_layout
        if not self.reduce.quantised:
            return ExactOuter(self.outer, ExactReducer(layout, self.axis))
        return QuantisedOuter(self.outer, QuantisedReducer(sending_layout(layout, self.axis), self.reduce, self.axis))
