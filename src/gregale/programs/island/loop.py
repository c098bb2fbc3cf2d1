"""The loop of an island: steps, and between them the commands of the fleet's rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from haliax import NamedArray

from gregale.checkpoint.store import Checkpoints
from gregale.data.examples import ExampleBatch, Examples
from gregale.data.mixtures import ReplicaExamples
from gregale.distributed.signals import StopRequest
from gregale.errors import UserError
from gregale.islands import outer_checkpoint
from gregale.islands.driver import Driver
from gregale.islands.follower import Follower
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter
from gregale.methods.schedule import Schedule
from gregale.programs.island.stepper import IslandStepper
from gregale.programs.runtime.batches import Placement
from gregale.programs.runtime.checkpointed import checkpoint_metadata, checkpointed
from gregale.programs.train.counts import DataPosition, Traffic
from gregale.programs.train.loop import HELP, Loop, after_skipping
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import StepLog, TooManySkipped
from gregale.storage import StoragePath, StoreError
from gregale.storage.jsonl_writer import FileJsonlWriter, ObjectJsonlWriter
from gregale.training.state import TrainState
from gregale.training.stepper import Stepper

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
    """

    step: Stepper
    outer: HostOuter
    controller: Driver | Follower
    folder: StoragePath
    seen: list[float]
    rounds: FileJsonlWriter | ObjectJsonlWriter | None = None

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


class IslandLoop(Loop):
    """The training loop of an island. It ends after the fleet's last round, or when the island has left the fleet."""

    def __init__(self, resources: IslandResources, *arguments):
        super().__init__(*arguments)
        self._resources = resources
        self._stagger = CheckpointStagger(self._setup.config.checkpoint.every, resources.controller.pace.schedule)

    def run(self, start: Start, stop: StopRequest) -> int:
        """Train until the fleet is complete, or until a stop is requested; return the number of steps.

        `complete` is true in the first case. The state is saved in both cases.
        """
        config, setup, resources = self._setup.config, self._setup, self._resources
        controller = resources.controller
        state, step = start.state, start.step
        traffic, consumed = Traffic(setup, step, 0), DataPosition(config.batch, step, start.examples)
        log = StepLog(setup, self._observers, traffic, consumed, self._spent)
        assert isinstance(setup.method, Island)
        stepper = IslandStepper(
            setup.method, self._resources.step, self._resources.outer, controller, self._resources.seen, step
        )
        placement = Placement(setup.batch_axes, setup.layout)
        leaving, finish = False, None
        try:
            with LeasedBatches(self._corpus.train, placement, controller.take) as batches:
                state, finish = stepper.follow(state)
                log.restart()
                while finish is None:
                    if stop.agreed(step) and not leaving:
                        leaving = True
                        controller.leave()
                        state, finish = stepper.follow(state)
                        continue
                    with self._spent.on("data_seconds"):
                        batch = next(batches, None)
                    if batch is None:  # all leased data is used
                        state, finish = stepper.follow(state, starved=True)
                        continue
                    metrics = self._inspected(setup.method, state, batch, stepper.step + 1, log)
                    state, report = stepper(state, batch)
                    log.took(stepper.step, report, metrics)
                    state, finish = stepper.follow(state)
                    step = stepper.step
                    if finish is None:  # otherwise the end of the run saves, below
                        self._between(stepper, state, step, log, traffic, consumed)
            log.catch_up()
        except TooManySkipped as error:
            raise UserError(f"{error} {after_skipping(state)}") from None
        if 0 < step == log.skipped:
            raise UserError(f"All {step} steps were skipped: in none of them were loss and gradient finite. {HELP}")
        self.complete = finish is not None and finish.complete
        if self.complete:
            state = stepper.with_outer_parameters(state)
        self._checkpoints.outdate(step)  # a round may have ended since, if the island was out of data
        self._save_all(stepper, state, step, traffic, consumed)
        if self.complete:
            self._evaluate_and_sample(setup.method, state, step)
        return step

    complete = False

    def _between(
        self,
        stepper: IslandStepper,
        state: TrainState,
        step: int,
        log: StepLog,
        traffic: Traffic,
        consumed: DataPosition,
    ) -> None:
        """Evaluate and save if due."""
        config = self._setup.config
        evaluates = config.evaluation.every is not None and step % config.evaluation.every == 0
        saves = self._stagger.is_due(stepper.arrived, stepper.save_offset)
        if not (evaluates or saves):
            return
        log.catch_up()
        if evaluates:
            with self._spent.on("evaluation_seconds"):
                self._evaluate_and_sample(self._setup.method, state, step)
        if saves:
            self._save_all(stepper, state, step, traffic, consumed)
        log.restart()

    def _save_all(
        self, stepper: IslandStepper, state: TrainState, step: int, traffic: Traffic, consumed: DataPosition
    ) -> None:
        """Save both states: the outer one, which is in memory already, then the inner one in the background."""
        resources, controller, method = self._resources, self._resources.controller, self._setup.method
        outer, moment = controller.side
        if outer is None or step == 0:
            return
        counted = {
            "replica_bytes": traffic.bytes_sent(step),
            "examples": consumed.examples(step),
            "islands": {
                "round": outer.round,
                "seen": stepper.seen(),
                "complete": self.complete,
                **controller.to_save(stepper.batches),
            },
        }

        def save_outer() -> None:
            outer_checkpoint.keep_only(resources.folder, rounds_of(self._checkpoints) | {outer.round})
            leaves, own_leaves = resources.outer.leaves(moment), resources.outer.own_leaves(moment)
            outer_checkpoint.write(resources.folder, outer, leaves, own_leaves)
            self._observers.trackers.flush()
            resources.flush()

        metadata = checkpoint_metadata(self._setup, self._corpus, method, step, counted)
        with self._spent.on("saving_seconds"):
            self._checkpoints.save(step, checkpointed(self._setup, method, state, step), metadata, save_outer)


def rounds_of(checkpoints: Checkpoints) -> set[int]:
    """Return the rounds of the checkpoints, whose outer states must be kept.

    An unreadable checkpoint has none. Raises `StoreError` if the store fails, because that checkpoint may be valid.
    """
    found = set()
    for step in checkpoints.steps():
        try:
            found.add(checkpoints.metadata(step)["islands"]["round"])
        except StoreError:
            raise
        except (UserError, KeyError):
            continue
    return found


class LeasedBatches(Iterator[dict[str, NamedArray]]):
    """Batches as global arrays [batch, position], made ahead of time; use it in a `with` statement.

    - `examples`: the examples of all islands; an example is a function of its number alone
    - `placement`: of a batch on this island's mesh
    - `take`: takes the next batch and returns its first example; None if no example is leased
    """

    def __init__(self, examples: Examples | ReplicaExamples, placement: Placement, take: Callable[[], int | None]):
        self._examples, self._placement, self._take = examples, placement, take
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")
        self._made: deque[Future[ExampleBatch]] = deque()

    def __next__(self) -> dict[str, NamedArray]:
        """Return the next batch; StopIteration for now if none is leased."""
        while len(self._made) < BATCHES_AHEAD and (first := self._take()) is not None:
            self._made.append(self._threads.submit(self._batch, first))
        if not self._made:
            raise StopIteration
        rows = self._made.popleft().result()
        return {name: self._placement.placed(array) for name, array in rows.items()}

    def _batch(self, first: int) -> ExampleBatch:
        return self._examples.batch(first, self._placement.size, self._placement.rows)

    def __enter__(self) -> LeasedBatches:
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(cancel_futures=True)


class CheckpointStagger:
    """Save turns: once in `every` steps of the fleet's schedule, at this island's offset; never with `every` None.

    So the islands save one after the other. After the loss of a whole fleet, the newest of their checkpoints is younger
    than `every` steps. With offset k / R the turns are after k / R, 1 + k / R, ... times `every` steps.
    """

    def __init__(self, every: int | None, schedule: Schedule):
        self._every, self._schedule = every, schedule
        self._last: int | None = None  # number of the last turn

    def is_due(self, arrived: int | None, offset: float) -> bool:
        """Return whether it is this island's turn, and take the turn; call it after each step.

        - `arrived`: the newest round in its parameters; None: none yet
        - `offset`: in [0, 1); a change of membership moves it, which may delay a turn by up to `every` steps
        """
        if self._every is None or arrived is None:
            return False
        turn = math.floor(self._schedule.round_step(arrived) / self._every - offset)
        last = math.floor(self._schedule.round_step(arrived - 1) / self._every - offset)
        last = last if self._last is None else self._last
        self._last = max(turn, last)
        return turn > last
