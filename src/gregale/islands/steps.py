"""The steps of an island, the commands between two of them (messages depart, fragments arrive), and its status.

Clients with the fleet's secret read the status, and send small messages.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.checkpoint.files import not_finite
from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples
from gregale.distributed.liveness import Phase
from gregale.distributed.signals import StopRequest
from gregale.errors import UserError
from gregale.islands import shards
from gregale.islands import trainer_command as commands
from gregale.islands.driver import Driver
from gregale.islands.hosts import Follower
from gregale.islands.method import Island
from gregale.islands.outer import HostOuter, OuterView
from gregale.islands.protocol.messages import RoundDue
from gregale.islands.state import DataLeases, InnerOptimizerState, on_host, taken_over
from gregale.islands.transport.client import RequestRejected
from gregale.methods.schedule import Fragment
from gregale.programs.runtime.batches import BatchSharding
from gregale.programs.runtime.setup import Setup
from gregale.programs.train.loop import Batch, NextPrograms, Steps
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import Observers
from gregale.storage import StoragePath
from gregale.storage.jsonl import FileJsonlWriter, ObjectJsonlWriter
from gregale.tracking.callback import Callback, Callbacks, Metrics, finite
from gregale.training.state import Stepper, StepReport, TrainState

Tree = Any
THREADS = 4
BATCHES_AHEAD = 8  # made before they are requested; limits the memory


@dataclass(frozen=True)
class IslandResources:
    """The parts of an island beside the state of its devices.

    - `step`: takes the inner steps; its program is compiled
    - `outer`: theta and the outer optimizer, in host memory
    - `controller`: the driver on host 0, a follower on each other host; both give the same commands and batches
    - `folder`: the folder of the outer checkpoints
    - `seen`: tokens by fragment since the island last contributed to it, at the start
    - `rounds`: the writer of rounds.jsonl; None: another host of this island writes it
    - `leases`: the examples leased to this island; None: another host of this island holds them
    - `stage_at`: returns the number of the fleet's stage, from 0, after so many rounds
    - `stage`: the number of this stage
    - `firsts`: the fleet's first example of each stage from the second to this
    - `bases`: the theta that each fragment of the island's parameters is based on
    """

    step: Stepper
    outer: HostOuter
    controller: Driver | Follower
    folder: StoragePath
    seen: list[float]
    rounds: FileJsonlWriter | ObjectJsonlWriter | None = None
    leases: DataLeases | None = None
    stage_at: Callable[[int], int] = lambda round: 0
    stage: int = 0
    firsts: tuple[int, ...] = ()
    bases: dict[int, OuterView] = field(default_factory=dict)

    def flush(self) -> None:
        """Write the buffered rounds; raise `StoreError` if a store does not accept them."""
        if self.rounds is not None:
            self.rounds.flush()

    def close(self, report: Callable[[str], None]) -> None:
        """Leave the fleet, and write the remaining rounds: neither a full disk nor an unreachable store ends a run."""
        self.controller.close()
        try:
            if self.rounds is not None:
                self.rounds.close()
        except UserError as error:
            report(str(error))


class Departed(NamedTuple):
    """A message that was handed over: its fragment, its tokens, and the error if it is used."""

    index: int
    tokens: jax.Array
    error: Tree


class IslandSteps(Steps):
    """The steps of an island in one stage, and its controller's commands between them.

    The steps end after the fleet's last round, when the island has left the fleet, or with a round after which the
    fleet is in another stage.

    - `step`: steps done, by this island or by the peer whose inner optimizer it took over
    - `batches`: steps taken by this process
    - `arrived`: the newest round in the parameters; None before the first
    - `stage`, `firsts`: as in `IslandResources`
    - `coming`: the same two of the fleet with that round
    - `save_offset`: the island's turn to save within a period of checkpoints, in [0, 1)
    - `following`: functions that compile the programs of the next stage
    """

    compiled = -1  # the programs are compiled before the island joins

    def __init__(
        self,
        setup: Setup,
        resources: IslandResources,
        examples: Examples | ReplicaExamples,
        start: Start,
        stop: StopRequest,
        observers: Observers,
        following: Iterable[Callable[[], object]] = (),
    ):
        assert isinstance(setup.method, Island)
        self._next = NextPrograms(following)
        self.method = self._island = setup.method
        self._take, self._outer, self._controller = resources.step, resources.outer, resources.controller
        self.stop, self._observers = stop, observers
        self._examples = LeasedBatches(
            examples, BatchSharding(setup.batch_axes, setup.layout), resources.controller.take
        )
        self._seen = jnp.asarray(resources.seen, jnp.float32)  # [fragment]
        self._departed: Departed | None = None  # the newest message, unless it is used up
        # Rounds of each fragment that passed without this island, though it had steps; `batches` before these steps.
        self._missed, self._since = ([0] * self._island.schedule.fragments for _ in range(2))
        self._bases = resources.bases
        self.state, self.step, self.base, self.batches = start.state, start.step, start.base, 0
        self.unfinished = start.unfinished
        self._report: StepReport | None = None  # of the newest step with these parameters
        self.arrived: int | None = None
        self.stage, self.firsts, self._stage_at = resources.stage, resources.firsts, resources.stage_at
        self.coming = self.stage, self.firsts
        self.save_offset = 0.0
        self._is_leaving = False
        self._finish: commands.Finish | None = None

    @property
    def ended(self) -> bool:
        return self._finish is not None

    @property
    def complete(self) -> bool:
        return self._finish is not None and (self._finish.complete or self.stop_reason is not None)

    @property
    def ended_stage(self) -> bool:
        """Whether the fleet's stage is another one, or began with another example."""
        return self.coming != (self.stage, self.firsts)

    def next_batch(self) -> Batch | None:
        """Return the next leased batch; without one, execute commands until there is one."""
        while not (self.ended or self.ended_stage):
            if not self._is_leaving and self.is_stopped():
                self._is_leaving = True
                self._controller.leave()
                self.between()
                continue
            with self._observers.spent.on("data_seconds"):
                batch = next(self._examples, None)
            if batch is not None:
                return batch
            self.between(starved=True)
        if self.ended_stage and not (self.ended or self._is_leaving):
            self._observers.progress.at(self.step, Phase.COMPILING)
            self._next.wait()
        if self.complete:
            self.state = self._with_outer_parameters(self.state)
        return None

    def take(self, batch: Batch) -> StepReport:
        self.step, before = self.step + 1, self._report
        self.state, self._report = self._take(self.state, batch, self.step)
        self._seen = _add(self._seen, self._report.metrics.weight)
        self.batches += 1
        self._next.start()
        self._controller.stepped()
        # Read one step late, as the log does, so that a step is queued on the device. But a message then contains that
        # step, and is on the host only after it: an island that hands messages over early waits for each step.
        if (report := self._report if self._controller.is_early else before) is not None:
            self._check(report)
        return self._report

    def _check(self, report: StepReport) -> None:
        """Report a divergence after a skipped step: a state that is not finite, or a second skipped step in a row.

        A single skipped step changes nothing, and a finite state may be right for the next batch.
        """
        in_a_row = int(report.skipped_in_a_row)
        if in_a_row > 1 or (in_a_row and not_finite(self.state.method)):
            self._controller.diverged()

    def between(self, starved: bool = False) -> None:
        """Execute the pending commands; after `Finish` there are no more steps.

        - `starved`: no data is leased, so it executes commands until there is data
        """
        while not self.ended_stage and (order := self._order(starved)) is not None:
            match order:
                case commands.SendMessage(number):
                    self._depart(self.state, number)
                case commands.ApplyRound(number, weight, save_offset):
                    self.save_offset = save_offset
                    self.state = self._arrive(self.state, number, weight)
                    self._note_arrived(number)
                case commands.LoadOuterState(number, inherits, keeps):
                    inner = self._controller.inherited() if inherits else None
                    if keeps:
                        missed = 0 if self.arrived is None else number - 1 - self.arrived
                        self._missed = [each + missed // len(self._missed) for each in self._missed]
                        self.state = self._rebased(self.state, range(self._island.schedule.fragments))
                    else:
                        self.state = self._with_outer_parameters(self.state, inner)
                        self._seen, self._report = jnp.zeros_like(self._seen), None
                        self._missed, self._since = ([each] * len(self._missed) for each in (0, self.batches))
                    self._departed = None
                    self._note_arrived(number - 1)
                case commands.CopyInnerState():
                    self._controller.shown(InnerOptimizerState(self.step, on_host(self.state.method.psdp)))
                case commands.Finish():
                    self._finish = order
                    return

    def _order(self, starved: bool) -> commands.TrainerCommand | None:
        with self._observers.progress.waiting(Phase.SYNCHRONISING):
            return self._controller.order(starved)

    def __enter__(self) -> "IslandSteps":
        self.between()
        return self

    def __exit__(self, *_: object) -> None:
        self._examples.close()
        self._next.end()

    def _with_outer_parameters(self, state: TrainState, inner: InnerOptimizerState | None = None) -> TrainState:
        """Return the state with the outer parameters, a peer's inner optimizer and step if given, and all finite."""
        for index in range(self._island.schedule.fragments):
            state = self._mixed(state, self._island.fragment(index), index, keep=0.0)
        if inner is not None:
            self.step, psdp = inner.step, taken_over(state.method.psdp, inner.arrays)
            step = jax.make_array_from_callback((), state.step.sharding, lambda _: np.int32(inner.step))
            state = state._replace(step=step, method=state.method._replace(psdp=psdp))
        return state._replace(method=without_nonfinite(state.method))

    def seen(self) -> list[float]:
        return [float(each) for each in jax.device_get(self._seen)]

    def _depart(self, state: TrainState, number: int) -> None:
        index = self._island.schedule.round_fragment(number)
        theta = self._outer.theta(index, self._controller.side.moment)
        messages, error = self._island.depart(state.method, theta, self._island.fragment(index))
        self._departed = Departed(index, self._seen[index], error)
        norm = self._island.norm(state.method, theta, self._island.fragment(index))
        for message in jax.tree.leaves(messages):
            message.copy_to_host_async()
        # Older steps change a theta that others have moved since: they count for less.
        down = partial(_down, messages, self._departed.tokens / (1 + self._missed[index]), norm)
        self._controller.message_sent(number, down, self._controller.used(self.batches))

    def _note_arrived(self, number: int) -> None:
        """Note the newest round in the parameters, and the stage of the fleet with it."""
        record, stage = self._controller.side.record, self._stage_at(number + 1)
        assert record is not None
        self.arrived, self.coming = number, (stage, record.ledger.stages[:stage])

    def _arrive(self, state: TrainState, number: int, weight: float) -> TrainState:
        index = self._island.schedule.round_fragment(number)
        if weight == 0:
            self._missed[index] += self.batches > self._since[index]
            return self._rebased(state, [index])
        self._missed[index], self._since[index] = 0, self.batches
        error, departed, self._departed = None, self._departed, None
        if departed is not None:  # otherwise the state was replaced after the message had departed
            assert departed.index == index, f"a message of fragment {departed.index} is used in round {number}"
            error, self._seen = departed.error, self._seen.at[index].add(-departed.tokens)
        return self._mixed(state, self._island.fragment(index), index, self._island.mixing, error)

    def _rebased(self, state: TrainState, fragments: Iterable[int]) -> TrainState:
        """Return the state with the newest theta of fragments, and this island's steps."""
        for index in fragments:
            before, theta = self._outer.theta(index, self._bases[index]), self._outer.theta(index, self._moved(index))
            method = self._island.rebase(state.method, before, theta, self._island.fragment(index))
            state = state._replace(method=method)
        return state

    def _mixed(self, state: TrainState, fragment: Fragment, index: int, keep: float, error: Tree = None) -> TrainState:
        theta = self._outer.theta(index, self._moved(index))
        return state._replace(method=self._island.arrive(state.method, theta, fragment, keep, error))

    def _moved(self, index: int) -> OuterView:
        """Note that a fragment of the parameters is based on the theta of the last command, and return that."""
        self._bases[index] = self._controller.side.moment.part(index)
        return self._bases[index]


def _down(messages: dict[str, jax.Array], weight: jax.Array, norm: jax.Array) -> commands.DeviceToHostCopy:
    size = float(norm)
    return commands.DeviceToHostCopy(shards.on_host(messages), float(weight), size if math.isfinite(size) else None)


@partial(jax.jit, donate_argnums=0)
def without_nonfinite(state: Tree) -> Tree:
    """Return a state with 0 in place of values that are not finite, after a divergence."""

    def finite(array: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(array), array, 0) if jnp.issubdtype(array.dtype, jnp.inexact) else array

    return jax.tree.map(finite, state)


@jax.jit
def _add(seen: jax.Array, weight: jax.Array) -> jax.Array:
    return seen + weight


class LeasedBatches(Iterator[dict[str, NamedArray]]):
    """Batches as global arrays [batch, position], made ahead of time.

    - `examples`: the examples of all islands; an example is a function of its number alone
    - `placement`: of a batch on this island's mesh
    - `take`: takes the next batch and returns its first example; None if no example is leased
    """

    def __init__(self, examples: Examples | ReplicaExamples, placement: BatchSharding, take: Callable[[], int | None]):
        self._examples, self._placement, self._take = examples, placement, take
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")
        self._made: deque[Future[ExampleBatch]] = deque()

    def __next__(self) -> dict[str, NamedArray]:
        """Return the next batch; StopIteration for now if none is leased."""
        while len(self._made) < BATCHES_AHEAD and (first := self._take()) is not None:
            self._made.append(self._threads.submit(self._batch, first))
        if not self._made:
            raise StopIteration
        return self._placement.placed(self._made.popleft().result())

    def _batch(self, first: int) -> ExampleBatch:
        return self._placement.part(self._examples.batch(first, self._placement.size, self._placement.rows))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class StatusTracker(Callback):
    """A callback before all others: it adds the fleet's metrics to those of each step, and keeps the newest values.

    - `state`: starting, joining, training, complete or left
    - `callbacks`: receive the metrics
    """

    def __init__(self, name: str, steps: int, step: int):
        self.state = "starting"
        self.callbacks = Callbacks([])
        self._name, self._steps, self._step = name, steps, step
        self._values: dict[str, float | int | None] = {}
        self._driver: Driver | None = None
        self._began, self._lost_before = time.monotonic(), 0.0

    def follow(self, driver: Driver) -> None:
        self._driver = driver

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Pass on the metrics of a step, with those of the fleet."""
        if self.state == "joining":
            self._began, self._lost_before = time.monotonic(), self._lost()
        self._step, self.state = step, "training"
        self._keep(metrics)
        self.callbacks.on_step(step, {**metrics, **self.fleet_metrics()})

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self._keep(metrics)
        self.callbacks.on_evaluation(step, metrics)

    def on_end(self, step: int) -> None:
        """Pass it on; the callbacks are closed where they were opened."""
        self.callbacks.on_end(step)

    def _keep(self, metrics: Metrics) -> None:
        self._values |= {name: metrics[name] for name in ("loss", "tokens_per_second", "eval_loss") if name in metrics}

    def fleet_metrics(self) -> dict[str, float | int]:
        """Return the metrics of the fleet's rounds for this island.

        `goodput`: the share of the time since the first step in which it neither waited for the network nor healed.
        """
        if (driver := self._driver) is None:
            return {}
        lost, elapsed = self._lost() - self._lost_before, time.monotonic() - self._began
        return {
            "round": driver.round,
            "members": len(driver.members),
            "waiting_seconds": driver.waiting_seconds,
            "healing_seconds": driver.healing_seconds,
            "network_bytes_sent": driver.worker.count.sent,
            "network_bytes_received": driver.worker.count.received,
            "goodput": max(0.0, 1 - lost / elapsed) if elapsed > 0 else 1.0,
        }

    def _lost(self) -> float:
        """Return the seconds of waiting and of healing so far."""
        return self._driver.waiting_seconds + self._driver.healing_seconds if self._driver is not None else 0.0

    def status(self) -> dict[str, Any]:
        """Return the newest metrics that are finite, with the names of the members."""
        fixed = {"name": self._name, "state": self.state, "step": self._step, "steps": self._steps, "round": -1}
        driver = self._driver
        members, stalled = (list(driver.members), driver.stalls.line) if driver is not None else ([], None)
        return {**fixed, **self.fleet_metrics(), "members": members, "stalled": stalled, **finite(self._values)}

    def on_message(self, message: dict) -> dict:
        """Handle a peer's message; raise RequestRejected for one that this version does not know."""
        if message.get("kind") == "due" and type(message.get("round")) is int and self._driver is not None:
            self._driver.post(RoundDue(message["round"]))
            return {}
        # The server has checked the name; only this island's own hosts may speak for it.
        if message.get("kind") == "host" and message.get("name") == self._name and self._driver is not None:
            return self._driver.worker.handle(message)
        if message.get("kind") == "inner" and self._driver is not None:
            return self._driver.show()
        raise RequestRejected("unknown message")
