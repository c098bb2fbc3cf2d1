"""The loop of an island: steps, and between them what the fleet's rounds want."""

from __future__ import annotations

from dataclasses import dataclass

from gregale.errors import UserError
from gregale.islands import files
from gregale.islands.guide import Guide
from gregale.methods.island_outer import HostOuter
from gregale.programs.island.batches import LeasedBatches
from gregale.programs.island.recorder import Recorder
from gregale.programs.island.stepper import IslandStepper
from gregale.programs.island.turns import Turns
from gregale.programs.run.batches import Placement
from gregale.programs.run.checkpointed import checkpoint_metadata, checkpointed
from gregale.programs.train.counts import Consumed, Traffic
from gregale.programs.train.loop import HELP, Loop, after_skipping
from gregale.programs.train.resume import Start
from gregale.programs.train.step_log import StepLog, TooManySkipped
from gregale.services.checkpoint.store import Checkpoints
from gregale.services.signals import StopRequest
from gregale.storage import Place, StoreError
from gregale.training.state import TrainState


@dataclass(frozen=True)
class Sides:
    """What an island has beside the state of its devices.

    - `outer`: theta and the outer optimizer, in host memory
    - `folder`: where they are saved
    - `seen`: tokens by fragment since the island last contributed to it, at the start
    - `record`: of its rounds; None: another host of this island keeps it
    """

    outer: HostOuter
    guide: Guide
    folder: Place
    seen: list[float]
    record: Recorder | None = None

    def flush(self) -> None:
        """Writes what is held back of the record; raises `StoreError` if that fails."""
        if self.record is not None:
            self.record.flush()

    def close(self) -> None:
        """Leaves the fleet."""
        self.guide.close()
        if self.record is not None:
            self.record.close()


class IslandLoop(Loop):
    """As `Loop`; the run ends when the fleet has made all its rounds, or when the island has left it."""

    def __init__(self, sides: Sides, *arguments):
        super().__init__(*arguments)
        self._sides = sides
        self._turns = Turns(self._setup.config.checkpoint.every, sides.guide.pace.schedule)

    def run(self, start: Start, stop: StopRequest) -> int:
        """Trains until the fleet is complete, or until a stop is asked for; returns the steps done.

        `complete` says which. The state is saved either way.
        """
        config, setup, guide = self._setup.config, self._setup, self._sides.guide
        state, step = start.state, start.step
        traffic, consumed = Traffic(setup, step, 0), Consumed(config.batch, step, start.examples)
        log = StepLog(setup, self._observers, traffic, consumed, self._spent)
        stepper = IslandStepper(setup, self._sides.outer, guide, self._sides.seen, step)
        placement = Placement(setup.batch_axes, setup.layout)
        leaving, finish = False, None
        try:
            with LeasedBatches(self._corpus.train, placement, guide.take) as batches:
                state, finish = stepper.follow(state)
                log.restart()
                while finish is None:
                    if stop.agreed(step) and not leaving:
                        leaving = True
                        guide.leave()
                        state, finish = stepper.follow(state)
                        continue
                    with self._spent.on("data_seconds"):
                        batch = next(batches, None)
                    if batch is None:  # trained on all that was leased
                        state, finish = stepper.follow(state, starved=True)
                        continue
                    figures = self._inspected(setup.method, state, batch, stepper.step + 1, log)
                    state, report = stepper(state, batch)
                    log.took(stepper.step, report, figures)
                    state, finish = stepper.follow(state)
                    step = stepper.step
                    if finish is None:  # else what is saved, below, is the state at the end
                        self._between(stepper, state, step, log, traffic, consumed)
            log.catch_up()
        except TooManySkipped as error:
            raise UserError(f"{error} {after_skipping(state)}") from None
        if 0 < step == log.skipped:
            raise UserError(f"All {step} steps were skipped: in none of them were loss and gradient finite. {HELP}")
        self.complete = finish is not None and finish.complete
        if self.complete:
            state = stepper.all_of_theta(state)
        self._checkpoints.outdate(step)  # a round may have ended since, if the island was out of text
        self._save_all(stepper, state, step, traffic, consumed)
        if self.complete:
            self._evaluate_and_sample(setup.method, state, step)
        return step

    complete = False

    def _between(
        self, stepper: IslandStepper, state: TrainState, step: int, log: StepLog, traffic: Traffic, consumed: Consumed
    ) -> None:
        """Evaluates and saves what is due."""
        config = self._setup.config
        evaluates = config.evaluation.every is not None and step % config.evaluation.every == 0
        saves = self._turns.is_due(stepper.arrived, stepper.place)
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
        self, stepper: IslandStepper, state: TrainState, step: int, traffic: Traffic, consumed: Consumed
    ) -> None:
        """Saves both sides: the outer one, which is in memory already, then the devices' in the background."""
        sides, guide, method = self._sides, self._sides.guide, self._setup.method
        outer, moment = guide.side
        if outer is None or step == 0:
            return
        counted = {
            "replica_bytes": traffic.bytes_sent(step),
            "examples": consumed.examples(step),
            "islands": {
                "round": outer.round,
                "seen": stepper.seen(),
                "steps": guide.undecided_steps,
                "holder": guide.holder,
                "used": guide.used(stepper.batches),
                "complete": self.complete,
            },
        }

        def beside() -> None:
            files.keep_only(sides.folder, rounds_of(self._checkpoints) | {outer.round})
            files.write(sides.folder, outer, sides.outer.leaves(moment), sides.outer.own_leaves(moment))
            self._observers.trackers.flush()
            sides.flush()

        metadata = checkpoint_metadata(self._setup, self._corpus, method, step, counted)
        with self._spent.on("saving_seconds"):
            self._checkpoints.save(step, checkpointed(self._setup, method, state, step), metadata, beside)


def rounds_of(checkpoints: Checkpoints) -> set[int]:
    """The rounds that checkpoints were saved after: what is saved of these goes with them.

    One that cannot be read has none. Raises `StoreError` if the store does not tell: that one may be sound.
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
