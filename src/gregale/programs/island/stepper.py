"""The steps of an island, and the commands between two of them: messages depart, fragments arrive."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gregale.communication import shards
from gregale.islands.driver import Driver
from gregale.islands.follower import Follower
from gregale.islands.inner_optimizer_state import InnerOptimizerState, on_host, taken_over
from gregale.islands.trainer_command import ApplyRound, CopyInnerState, Down, Finish, LoadOuterState, SendMessage
from gregale.methods.fragments import Fragment
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter
from gregale.training.state import StepReport, TrainState
from gregale.training.stepper import Stepper

Tree = Any


class IslandStepper:
    """Takes the steps of an island and executes its controller's commands between them.

    - `step`: steps done, by this island or by the peer whose inner optimizer it took over
    - `batches`: steps taken by this process
    - `arrived`: the newest round in the parameters; None before the first
    - `save_offset`: the island's turn to save within a period of checkpoints, in [0, 1)
    """

    def __init__(
        self,
        island: Island,
        take_step: Stepper,
        outer: HostOuter,
        controller: Driver | Follower,
        seen: list[float],
        step: int,
    ):
        """Create the stepper.

        - `seen`: tokens by fragment since this island last contributed to it
        - `step`: steps done before
        """
        self._island, self._step, self._outer, self._controller = island, take_step, outer, controller
        self._seen = jnp.asarray(seen, jnp.float32)  # [fragment]
        self._errors: dict[int, Tree] = {}  # residuals of the first quantisation, by round, of messages in progress
        self.step, self.batches = step, 0
        self.arrived: int | None = None
        self.save_offset = 0.0

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepReport]:
        """Take the next step; the incoming state is donated."""
        self.step += 1
        state, report = self._step(state, batch, self.step)
        self._seen = _add(self._seen, report.metrics.weight)
        self.batches += 1
        self._controller.stepped()
        return state, report

    def follow(self, state: TrainState, starved: bool = False) -> tuple[TrainState, Finish | None]:
        """Execute the pending commands; the incoming state may be donated. After `Finish` there are no more steps.

        - `starved`: no data is leased, so it executes commands until there is data
        """
        while (order := self._controller.order(starved)) is not None:
            match order:
                case SendMessage(number):
                    self._depart(state, number)
                case ApplyRound(number, weight, save_offset):
                    self.save_offset = save_offset
                    state = self._arrive(state, number, weight)
                case LoadOuterState(number, inherits):
                    inner = self._controller.inherited() if inherits else None
                    state = self._taken_over(self.with_outer_parameters(state), inner)
                    self._seen, self._errors = jnp.zeros_like(self._seen), {}
                    self.arrived = number - 1
                case CopyInnerState():
                    self._controller.shown(InnerOptimizerState(self.step, on_host(state.method.psdp)))
                case Finish():
                    return state, order
        return state, None

    def with_outer_parameters(self, state: TrainState) -> TrainState:
        """Return the state with the outer parameters in place of its own."""
        for index in range(self._island.schedule.fragments):
            state = self._mixed(state, self._island.fragment(index), index, keep=0.0)
        return state

    def seen(self) -> list[float]:
        """Return the tokens by fragment since this island last contributed to it; wait for the device."""
        return [float(each) for each in jax.device_get(self._seen)]

    def _taken_over(self, state: TrainState, inner: InnerOptimizerState | None) -> TrainState:
        """Return the state with a peer's inner optimizer and step count, or with its own optimizer, made finite."""
        if inner is None:
            psdp = state.method.psdp
            sharded, gathered = without_nonfinite((psdp.sharded, psdp.gathered))
            return state._replace(method=state.method._replace(psdp=psdp._replace(sharded=sharded, gathered=gathered)))
        self.step = inner.step
        psdp = taken_over(state.method.psdp, inner.arrays)
        step = jax.make_array_from_callback((), state.step.sharding, lambda _: np.int32(inner.step))
        return state._replace(step=step, method=state.method._replace(psdp=psdp))

    def _depart(self, state: TrainState, number: int) -> None:
        index = self._island.schedule.round_fragment(number)
        theta = self._outer.theta(index, self._controller.side.moment)
        messages, error = self._island.depart(state.method, theta, self._island.fragment(index))
        self._errors = {number: error}
        norm = self._island.norm(state.method, theta, self._island.fragment(index))
        for message in jax.tree.leaves(messages):
            message.copy_to_host_async()
        down = partial(_down, messages, self._seen[index], norm)
        self._controller.message_sent(number, down, self._controller.used(self.batches))

    def _arrive(self, state: TrainState, number: int, weight: float) -> TrainState:
        self.arrived = number
        error = self._errors.pop(number, None)
        if weight == 0:  # it did not contribute, so it keeps its own parameters
            return state
        index = self._island.schedule.round_fragment(number)
        self._seen = self._seen.at[index].add(-weight)
        return self._mixed(state, self._island.fragment(index), index, self._island.mixing, error)

    def _mixed(self, state: TrainState, fragment: Fragment, index: int, keep: float, error: Tree = None) -> TrainState:
        theta = self._outer.theta(index, self._controller.side.moment)
        return state._replace(method=self._island.arrive(state.method, theta, fragment, keep, error))


def _down(messages: dict[str, jax.Array], weight: jax.Array, norm: jax.Array) -> Down:
    size = float(norm)
    return Down(shards.on_host(messages), float(weight), size if math.isfinite(size) else None)


@partial(jax.jit, donate_argnums=0)
def without_nonfinite(optimizer: Tree) -> Tree:
    """Return an optimizer's state with 0 in place of values that are not finite, after a divergence."""

    def finite(array: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(array), array, 0) if jnp.issubdtype(array.dtype, jnp.inexact) else array

    return jax.tree.map(finite, optimizer)


@jax.jit
def _add(seen: jax.Array, weight: jax.Array) -> jax.Array:
    return seen + weight
