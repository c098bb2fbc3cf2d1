"""The source of a loop's steps: their batches, their state, and what happens between two of them."""

from abc import ABC, abstractmethod
from typing import Any, Self

from gregale.checkpoint.multihost import first_message
from gregale.distributed.liveness import Phase
from gregale.distributed.signals import StopRequest
from gregale.methods.method import Method
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.memory import check_program
from gregale.programs.runtime.trained_model import Base
from gregale.programs.train.next_programs import NextPrograms
from gregale.programs.train.resume import Start, converted
from gregale.programs.train.stages import PreparedStage
from gregale.programs.train.step_log import Observers
from gregale.training.state import StepReport, TrainState

Batch = dict[str, Any]


class Steps(ABC):
    """The steps of a run, in a `with` statement.

    - `state`, `step`: the state, and the number of steps done
    - `method`: the method that takes the next step
    - `compiled`: the step before which the step's program was new, so that the next step compiles it
    - `stop`: the requests of signals and of callbacks to end the run
    - `stop_reason`: the reason of the callback that ended the run; None if none did
    - `base`: the origin of frozen weights; None if there are none
    - `unfinished`: whether a stop has left out callbacks of the last step, which the next start calls
    """

    state: TrainState
    step: int
    method: Method
    compiled: int
    stop: StopRequest
    stop_reason: str | None = None
    base: Base | None = None
    unfinished: bool = False

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether there is no further step, so that the end of the run evaluates and saves."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the run has done all its steps, or a callback has ended it."""

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """Return the batch of the next step; None after the last step or a request to stop."""

    @abstractmethod
    def take(self, batch: Batch) -> StepReport:
        """Start the next step."""

    def is_stopped(self) -> bool:
        """Return whether a signal or a callback ends the run after this step; equal in all processes, as its reason."""
        if not self.stop.agreed(self.step):
            return False
        self.stop_reason = first_message(self.stop.reason)
        return True

    def between(self) -> None:
        """Do what follows a step that has started, before callbacks see its state; by default nothing."""
        return

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class MeshSteps(Steps):
    """The steps of a stage of `gregale train`, whose replicas are all on one mesh.

    - `ended_stage`: whether the stage has done its steps, and another one follows
    - `following`: the next stage, whose programs are compiled while this one trains; None: there is none
    """

    def __init__(
        self,
        stage: PreparedStage,
        start: Start,
        stop: StopRequest,
        observers: Observers,
        following: PreparedStage | None = None,
    ):
        setup = stage.setup
        self._stage, self._setup, self._last, self.stop, self._observers = stage, setup, stage.last, stop, observers
        self._first = start.step
        programs = () if following is None else following.compilations(stage.last)
        self._next = NextPrograms(compile_ for _, compile_ in programs)
        self.ended_stage = False
        examples = stage.corpus.training(start.mixtures)
        self._batches = GlobalBatches(examples, setup.batch_axes, setup.layout, start.examples)
        self.state, self.step, self.base, self.unfinished = start.state, start.step, start.base, start.unfinished
        self._use(setup.method_after(start.step))

    def _use(self, method: Method) -> None:
        self.method, self.compiled = method, self.step
        self._take = self._stage.stepper(method)

    @property
    def ended(self) -> bool:
        return self.complete

    @property
    def complete(self) -> bool:
        return self.step == self._setup.config.steps or self.stop_reason is not None

    def next_batch(self) -> Batch | None:
        if self.step >= self._setup.config.steps or self.is_stopped():
            return None
        if self.step >= self._last:
            self.ended_stage = True
            self._observers.progress.at(self.step, Phase.COMPILING)
            self._next.wait()
            return None
        if (method := self._setup.method_after(self.step)) is not self.method:
            self._observers.progress.at(self.step + 1, Phase.COMPILING)
            self.state = converted(self._setup, self.state, self.step, self.method)
            self._use(method)
        with self._observers.spent.on("data_seconds"):
            return next(self._batches)

    def take(self, batch: Batch) -> StepReport:
        if self.step == self._first:  # a checkpoint has its state, so that a refusal loses nothing
            for of, compile_ in self._stage.compilations(self._first):
                check_program(self._setup, of, compile_())
        self.state, report = self._take(self.state, batch, self.step + 1)
        self.step += 1
        if self.step > self._first:  # the programs of this stage come first
            self._next.start()
        return report

    def __exit__(self, *_: object) -> None:
        self._batches.close()
        self._next.end()
