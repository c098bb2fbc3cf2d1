"""Provides the training loop: the next batch, its step, and the events of callbacks.

The callbacks here evaluate, continue the prompts of `samples`, and save. While a stage trains, the programs of the next
stage are compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, ClassVar, Self

import jax

from gregale.atomic_files import os_error_text
from gregale.checkpoint.files import not_finite
from gregale.checkpoint.multihost import first_message
from gregale.checkpoint.store import Checkpoints
from gregale.data.preparation import Corpus
from gregale.distributed.liveness import Elapsed, Phase
from gregale.distributed.signals import Cut, StopRequest
from gregale.errors import UserError
from gregale.evaluation.bigram import bigram_bits_per_byte
from gregale.formatting import listed
from gregale.inference.generate import Sampling
from gregale.methods.method import Method
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.evaluation import format_losses, format_tasks, tasks_of
from gregale.programs.runtime.memory import check_program
from gregale.programs.runtime.sampler import Sampler, training_sampler
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import FrozenSource, checkpoint_metadata, checkpointed, reads_average
from gregale.programs.train.exports import Exports
from gregale.programs.train.resume import Start, converted
from gregale.programs.train.stages import PreparedStage
from gregale.programs.train.step_log import (
    DataPosition,
    Inspection,
    Observers,
    QuantisationFigures,
    StepLog,
    TooManySkipped,
    Traffic,
    is_due,
)
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.storage import StoreError
from gregale.streams import LEFT_AT_EXIT
from gregale.tracking.callback import Callback, Metrics, StepContext, call, own_metrics
from gregale.training.state import StepReport, TrainState


class NextPrograms:
    """Compiles programs in a thread, from shapes alone. Their first calls in the next stage find them compiled.

    An error is left to the stage, which compiles then and raises it. The process of a command that ends before does not
    wait for the compiler, unless other processes train with it: they end together.

    - `compilations`: functions that compile one program each; none if no stage follows
    """

    def __init__(self, compilations: Iterable[Callable[[], object]]):
        self._compilations, self._is_ended = compilations, False
        # No daemon: Python would abort the process when a daemon returns from the compiler while Python exits.
        self._thread = Thread(target=self._compile, name=LEFT_AT_EXIT if jax.process_count() == 1 else "compile")

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the programs are compiled."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self) -> None:
        """Begin no further program."""
        self._is_ended = True

    def _compile(self) -> None:
        with suppress(Exception):
            for program in self._compilations:
                if self._is_ended:
                    return
                program()


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
    base: FrozenSource | None = None
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


Tree = Any


class Evaluation(Callback):
    """Evaluates every `evaluation.every` steps, on held-out text and on tasks, and writes samples.

    - `latest`: the metrics of the last evaluation; empty without anything to evaluate on
    """

    seconds: ClassVar[str] = "evaluation_seconds"

    def __init__(self, stage: PreparedStage, run: RunDirectory, observers: Observers, steps: Steps):
        self._run, self._observers, self._steps = run, observers, steps
        setup, corpus, self._evaluate = stage.setup, stage.corpus, stage.evaluator
        self._setup, config = setup, setup.config
        first = None if self._evaluate is None else self._evaluate.text.first
        self._measure = QuantisationFigures(setup, first) if first and config.reduce.measure else None
        self._tasks = tasks_of(setup, corpus.tokenizer, run, observers.report)
        self._sampler = training_sampler(setup, corpus.tokenizer) if config.samples.prompts else None
        self.latest: dict[str, float] = {}

    def waits_after(self, step: int) -> bool:
        return is_due(step, self._setup.config.evaluation.every) and not self._steps.ended

    def after_step(self, pause: StepContext) -> Metrics:
        """Return the metrics of the evaluation; the samples are written before, because its line ends a run."""
        config = self._setup.config
        self._observers.progress.at(pause.step, Phase.EVALUATING)
        found: dict[str, float] = {}
        if self._evaluate is not None:
            frozen = self._setup.holding(None, pause.state.frozen)[1]
            found = self._evaluate(pause.model, config.evaluation.batches, self._between, frozen)
        if self._tasks is not None:
            found |= self._tasks(pause.model, lambda done, total: self._between())
        if self._measure is not None and pause.method is self._setup.method:
            found |= self._measure(pause.state)
        if self._sampler is not None:
            self._sample(self._sampler, pause.model, pause.step)
        self.latest = found
        return found

    def _between(self) -> None:
        """Between two batches, record the progress and see a request to stop."""
        self._observers.progress.still()
        self._steps.stop.check()

    def is_made(self, step: int) -> bool:
        """Return whether process 0 has logged the evaluation of a step; the same in every process."""
        made = jax.process_index() == 0 and self._run.has_evaluation(step)
        return first_message("made" if made else None) is not None

    def _sample(self, sampler: Sampler, model: Tree, step: int) -> None:
        samples = self._setup.config.samples
        sampling, model = Sampling(temperature=samples.temperature, seed=step), sampler.prepared(model)
        added = sampler.texts(model, samples.prompts, samples.tokens, sampling, at_block=self._between)
        texts = [prompt + text for prompt, text in zip(samples.prompts, added, strict=True)]
        if jax.process_index() == 0:
            try:
                self._run.write_samples(step, texts)
            except (OSError, StoreError) as error:
                why = error.fact.rstrip(".") if isinstance(error, StoreError) else os_error_text(error)
                self._observers.report(f"The samples of step {step} could not be written: {why}.")


class Saving(Callback):
    """Saves a checkpoint in the background once in `checkpoint.every` steps, or in that time, and for exports."""

    seconds: ClassVar[str] = "saving_seconds"

    def __init__(
        self,
        setup: Setup,
        corpus: Corpus,
        checkpoints: Checkpoints,
        observers: Observers,
        steps: Steps,
        counts: tuple[Traffic, DataPosition],
    ):
        self._setup, self._corpus, self._checkpoints = setup, corpus, checkpoints
        self._observers, self._steps = observers, steps
        self._traffic, self._consumed = counts
        self._left_at = steps.step if steps.unfinished else None  # the step whose callbacks an earlier start left out
        seconds = setup.config.checkpoint.seconds
        self._elapsed = None if seconds is None else self.turns(seconds)

    def turns(self, seconds: float) -> Elapsed:
        """Return the turns of checkpoints that come once in so many seconds."""
        return Elapsed(seconds)

    def waits_after(self, step: int) -> bool:
        due = self._is_due(step)
        return (due or self._setup.config.export.is_due(step)) and not self._steps.ended

    def _is_due(self, step: int) -> bool:
        """Return whether `checkpoint.every` asks for a checkpoint; called once after every step."""
        every = self._setup.config.checkpoint.steps
        return is_due(step, every) if self._elapsed is None else self._elapsed.is_due(step)

    def after_step(self, pause: StepContext) -> Metrics:
        self._save(pause, {}, self._observers.callbacks.flush)
        return {}

    def _save(self, pause: StepContext, counted: Mapping[str, Any], beside: Callable[[], object]) -> None:
        """Save the state with the run's counts and further entries of the metadata.

        - `beside`: writes what belongs to the checkpoint, before its commit
        """
        step, method = pause.step, pause.method
        self._observers.progress.at(step, Phase.SAVING)
        consumed = {"examples": self._consumed.examples(step), "mixtures": self._consumed.mixtures}
        counts = {"replica_bytes": self._traffic.bytes_sent(step), **consumed}
        if self._steps.base is not None:
            counted = {**counted, "base": self._steps.base.record}
        if self._steps.unfinished:
            counted = {**counted, "unfinished": True}
        elif step == self._left_at:  # they have been called
            self._checkpoints.outdate(step)
        metadata = checkpoint_metadata(self._setup, self._corpus, method, step, {**counts, **counted})
        self._checkpoints.save(step, checkpointed(self._setup, method, pause.state, step), metadata, beside)


def summary(evaluation: dict[str, float], corpus: Corpus, config: TrainConfig) -> str:
    """Return the last evaluation, with the loss of a bigram model if `evaluation.bigram` is set."""
    if not config.evaluates:
        return "Done. Nothing was evaluated: data.held_out is 0 and there is no data.validation."
    of_text = format_losses(evaluation, held_out=corpus.held_out is not None, bits_digits=3)
    words = "; ".join(filter(None, (of_text, format_tasks(evaluation))))
    text = f"Done. {words[0].upper()}{words[1:]}"
    if not config.evaluation.bigram:
        return text + "."
    scored = corpus.held_out_streams if corpus.held_out is not None else corpus.validation_streams
    streams = corpus.train_streams.values(), scored.values()
    bigram = bigram_bits_per_byte(*streams, corpus.tokenizer.token_bytes, config.data.cross_documents)
    return f"{text}; a bigram model counted on the same training text: {bigram:.3f} bits per byte."


def on_checkpoint(
    setup: Setup, run: RunDirectory, exports: Exports, report: Callable[[str], None]
) -> Callable[[int], None]:
    """Return what process 0 does after each checkpoint, in the thread that saves; errors of callbacks are reported."""

    def tell(step: int) -> None:
        run.note_checkpoint(step)
        exports.begin(step, setup.config.export)
        for callback in setup.callbacks:
            try:
                call(callback, "on_checkpoint", step)
            except UserError as error:
                report(f"{error} The run continues.")

    return tell


HELP = "A lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help."


class Loop:
    """The training loop of a run.

    Callbacks that wait for the devices are called in this order: the profile, the inspection, the evaluation, the
    callbacks of the configuration, and the saving of checkpoints, so that a checkpoint comes after its step's metrics.

    - `profile`: callbacks that come first
    """

    def __init__(
        self,
        stage: PreparedStage,
        steps: Steps,
        log: StepLog,
        observers: Observers,
        evaluation: Evaluation,
        saving: Saving,
        profile: Sequence[Callback] = (),
    ):
        self._steps, self._log, self._observers = steps, log, observers
        self._evaluation, self._saving = evaluation, saving
        self._stage, self._own = stage, stage.setup.callbacks
        self._waiting = (*profile, Inspection(stage.setup, observers.progress), evaluation, *self._own, saving)

    def run(self) -> int:
        """Train to the end, or until a request to stop; return the number of steps done.

        In both cases the loop saves the state of the last step.

        Raises `UserError` if too many steps in a row, or all, were skipped, or if the state to save is not finite.
        """
        steps, log, progress = self._steps, self._log, self._observers.progress
        try:
            with steps:
                log.restart()
                if steps.unfinished:
                    is_made = self._evaluation.is_made(steps.step)
                    self._after_step(self._own if is_made else (self._evaluation, *self._own))
                while (batch := self._next_batch()) is not None:
                    inspected = self._before_step(batch)
                    with jax.profiler.StepTraceAnnotation("train", step_num=steps.step + 1), progress.waiting():
                        report = steps.take(batch)  # a device's queue may be full
                    log.enqueue(steps.step, report, inspected)
                    steps.between()
                    self._after_step(self._waiting)
            log.flush()
        except TooManySkipped as error:
            raise UserError(f"{error} {after_skipping(steps.state)}") from None
        if 0 < steps.step == log.skipped:
            skipped = f"All {log.skipped} steps were skipped: in none of them were loss and gradient finite."
            raise UserError(f"{skipped} {HELP}")
        self._end()
        return steps.step

    def _next_batch(self) -> Batch | None:
        compiles = self._log.done <= self._steps.compiled
        self._observers.progress.at(self._steps.step + 1, Phase.COMPILING if compiles else Phase.TRAINING)
        return self._steps.next_batch()

    def _before_step(self, batch: Batch) -> dict[str, Any]:
        """Call the callbacks that wait before the next step; return their metrics."""
        step, metrics = self._steps.step + 1, {}
        if due := [each for each in self._waiting if each.waits_before(step)]:
            phase = self._observers.progress.current.phase
            self._log.flush()
            pause = self._pause(step, batch)
            for each in due:
                metrics |= self._call("before_step", each, pause)
            self._observers.progress.at(step, phase)
            self._log.restart()
        return metrics

    def _after_step(self, waiting: Sequence[Callback]) -> None:
        """Call those that wait after the last step; after a signal the rest is left to the next start."""
        step, self._steps.unfinished = self._steps.step, False
        if due := [each for each in waiting if each.waits_after(step)]:
            self._log.flush()
            pause = self._pause(step)
            with suppress(Cut):
                for each in due:
                    self._steps.unfinished = each is not self._saving
                    self._observers.progress.at(step, Phase.EVALUATING)
                    if each in self._own:
                        self._steps.stop.check()
                    self._tell(self._call("after_step", each, pause))
                self._steps.unfinished = False
            self._log.restart()

    def _end(self) -> None:
        """Save the last state, then evaluate it if the run is complete: an evaluation's line marks it as complete."""
        pause = self._pause(self._steps.step)
        self._call("after_step", self._saving, pause)
        if self._steps.complete:
            with suppress(Cut):
                self._tell(self._call("after_step", self._evaluation, pause))
        self._observers.callbacks.on_end(self._steps.step)

    def _pause(self, step: int, batch: Batch | None = None) -> StepContext:
        method = self._steps.method
        state, program, setup = self._steps.state, self._stage.trained(method), self._stage.setup

        average = state.average if reads_average(setup) else None

        def trained(of_method: Any) -> Any:
            return setup.holding(program(of_method, average), state.frozen)[0]

        return StepContext(step, state, method, batch, trained, self._steps.stop.ask, self._steps.stop.check)

    def _call(self, event: str, callback: Callback, pause: StepContext) -> dict[str, Any]:
        with self._observers.spent.on(callback.seconds):
            return own_metrics(callback, event, pause) if callback in self._own else getattr(callback, event)(pause)

    def _tell(self, metrics: dict[str, Any]) -> None:
        if metrics:
            self._observers.callbacks.on_evaluation(self._steps.step, metrics)


def after_skipping(state: TrainState) -> str:
    """Return the hint after many skipped steps: they change nothing, but an earlier update may not be finite."""
    if names := not_finite(state.method):
        return f"An update before them made {len(names)} arrays of the state infinite or NaN ({listed(names)}). {HELP}"
    return f"Nothing of these steps entered the parameters. {HELP}"
