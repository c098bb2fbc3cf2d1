"""PSDP with its updates applied one or two steps later, so that what crosses `replica` is hidden behind the steps.

Delayed(psdp, delay=2)      # sync: {type: delayed_psdp, delay: 2}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gregale.audit.step import StepShape
from gregale.communication.accumulate import finite_replicas, zero_sums
from gregale.communication.quantised import Lost
from gregale.methods.around import AroundPsdp
from gregale.methods.inspection import Inspected, Probe, inspected
from gregale.methods.method import PsdpState, StepMetrics
from gregale.methods.psdp import Psdp, either
from gregale.methods.traffic import DelayedTraffic

Tree = Any


class DelayedState(NamedTuple):
    """What a delayed PSDP carries from step to step."""

    psdp: PsdpState  # as the next step computes with it
    sums: Tree  # [replica, ...] float32 under `params`: gradients of the last step, not averaged yet
    weight: Any  # float32 scalar: their tokens, of all replicas; 0: there are none
    updates: Tree  # with delay 2, under `opt_state`: made of the gradients of the step before the last, not applied yet
    ready: Any  # with delay 2, bool scalar: whether there are such


@dataclass(frozen=True)
class Delayed(AroundPsdp):
    """PSDP whose parameters move by the gradients of an earlier step.

        g_t     = gradients of step t at p_t, left in the state as each replica's own sums
        u_t     = optimizer(average of g_t), computed in the program of step t + 1
        p_{t+1} = p_t + u_{t-d}              # d: the delay, 1 or 2

    Averaging is one reduce-scatter over `replica` of what came into the step, so it waits for nothing in the step and
    nothing in the step waits for it: the compiler can hide it behind the microbatches. Giving back is one all-gather
    over `replica`. With delay 2 it gathers the updates that came into the step, and is hidden as well. With delay 1 it
    gathers what the step has just averaged: behind the backward pass if there is one microbatch, else behind nothing.
    What is sent is what PSDP sends, and one number more. The price: a gradient is 1 or 2 steps old when it is used, one
    more buffer of gradients (and of updates in shards), and the last `delay` gradients of a run are not used.

    A step whose loss or gradient is not finite leaves the state as it was: what waits goes on waiting.
    """

    inner: Psdp
    delay: int

    name: ClassVar[str] = "delayed_psdp"
    shown: ClassVar[tuple[str, ...]] = ()

    def init(self, model: Tree | None = None) -> DelayedState:
        """The state before the first step: there is no gradient yet."""
        return self._with_nothing(self.inner.init(model))

    def begin(self, start: PsdpState, step: Any = 0) -> DelayedState:
        """The state that goes on from a PSDP state."""
        return self._with_nothing(self.inner.begin(start, step))

    def renewed(self, state: DelayedState) -> DelayedState:
        """A state of any mesh with no gradient and no error of quantised averages yet."""
        return self._with_nothing(self.inner.renewed(state.psdp))

    def without_error(self, state: DelayedState) -> DelayedState:
        """A state without what is cut as the mesh is: errors of quantised averages, gradients and their updates."""
        return DelayedState(self.inner.without_error(state.psdp), None, None, None, None)

    def _with_nothing(self, psdp: PsdpState) -> DelayedState:
        layout = self.layout
        sums = zero_sums(psdp.parameters, layout)
        if self.delay == 1:
            return DelayedState(psdp, sums, jnp.zeros(()), None, None)
        updates = layout.constrain(jax.tree.map(jnp.zeros_like, psdp.parameters), layout.opt_state)
        return DelayedState(psdp, sums, jnp.zeros(()), updates, jnp.array(False))

    def shardings(self, state: DelayedState) -> DelayedState:
        """Where each array of a state lives."""
        layout, everywhere = self.layout, NamedSharding(self.layout.mesh, PartitionSpec())
        later = state.updates is not None
        return DelayedState(
            psdp=self.inner.shardings(state.psdp),
            sums=layout.shardings(state.sums, layout.params),
            weight=None if state.weight is None else everywhere,
            updates=layout.shardings(state.updates, layout.opt_state) if later else None,
            ready=everywhere if later else None,
        )

    def step(self, state: DelayedState, batch: Tree) -> tuple[DelayedState, StepMetrics]:
        """One step on a batch, as `Psdp.step`; the norm is that of the gradient that is averaged in it, 0 at first."""
        new, reducer = self.inner.sums(state.psdp, batch), self.inner.reducer
        weight, loss = reducer.totals(new.weight, new.loss)
        loss = loss / weight
        # In a sum of its own: with one microbatch the loss is there before the backward pass, the gradients are not.
        (finite,) = reducer.totals(finite_replicas(new.gradients, self.layout))
        moved, norm, _ = self._moved(state, jnp.isfinite(loss))
        usable = jnp.isfinite(loss) & (finite == self.layout.replicas)
        moved = either(usable, moved._replace(sums=new.gradients, weight=weight), state)
        return moved, StepMetrics(loss, weight, norm, usable & jnp.isfinite(norm))

    def inspected(self, state: DelayedState, batch: Tree, probe: Probe) -> Inspected:
        """As `Psdp.inspected`; of gradients and updates it is the earlier ones that a step averages and applies."""
        moved, _, grads = self._moved(state, jnp.array(True))
        probed = probe(self.trained(state), batch)
        return inspected(state.psdp.parameters, grads, moved.psdp.parameters, probed)

    def _moved(self, state: DelayedState, usable: jax.Array) -> tuple[DelayedState, jax.Array, Tree]:
        """The state moved by what came into the step, and the gradient that was averaged, its norm first.

        Whatever is computed of what was received waits for `usable`, and so for the loss: the compiler would else
        compute it first, and wait for the transfer before the microbatches. With one microbatch the loss is there
        before the backward pass, so that what is computed of the first transfer is sent behind that.
        """
        inner, psdp = self.inner, state.psdp
        some = state.weight > 0
        grads, error = inner.reducer.reduce(state.sums, jnp.where(some, state.weight, 1.0), psdp.error)
        grads = jax.tree.map(lambda grad: grad * jnp.where(usable, 1.0, 0.0), grads)
        updates, moved, norm = inner.update(psdp._replace(error=error), grads)
        some &= jnp.isfinite(norm)
        if self.delay == 1:
            return state._replace(psdp=either(some, inner.apply(moved, updates), psdp)), norm, grads
        given = inner.apply(moved, state.updates)
        applied = either(state.ready & usable, given, psdp)
        optimizer, error = either(some, (moved.sharded, given.error), (psdp.sharded, psdp.error))
        updates = either(some, updates, jax.tree.map(jnp.zeros_like, updates))
        updates = self.layout.constrain(updates, self.layout.opt_state)
        psdp = applied._replace(sharded=optimizer, error=error)
        return state._replace(psdp=psdp, updates=updates, ready=some), norm, grads

    def parameters_only(self, state: DelayedState) -> DelayedState:
        """The part of a state that `trained` needs; the rest is None."""
        return DelayedState(self.inner.parameters_only(state.psdp), None, None, None, None)

    def lost(self, state: DelayedState, batch: Tree) -> Lost:
        """As `Psdp.lost`."""
        return self.inner.lost(state.psdp, batch)

    def bytes_sent(self, step: int) -> int:
        """Bytes that a device has sent over `replica` in the first `step` steps; the first ones send zeros."""
        return self.inner.bytes_sent(step)

    def trees(self, state: DelayedState) -> dict[str, Tree]:
        """PSDP's own, and what waits: `delayed`."""
        return {**self.inner.trees(state.psdp), "delayed": (state.sums, state.updates)}

    def traffic(self, step: StepShape) -> DelayedTraffic:
        return DelayedTraffic(self.inner.reducer, self.inner.model, step)
