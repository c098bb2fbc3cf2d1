"""Provides the training loop, which starts steps, reads their losses later, evaluates and saves."""

from __future__ import annotations

from collections.abc import Callable

import jax
from haliax import NamedArray

from gregale.atomic_files import os_error_text
from gregale.checkpoint.finite import listed, not_finite
from gregale.checkpoint.store import Checkpoints
from gregale.data.preparation import Corpus
from gregale.distributed.hang_detector import Phase
from gregale.distributed.signals import StopRequest
from gregale.errors import UserError
from gregale.inference.token_sampling import Sampling
from gregale.methods.method import Method
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.checkpointed import checkpoint_metadata, checkpointed
from gregale.programs.runtime.evaluation import Evaluator, evaluation_text
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.tasks import tasks_of
from gregale.programs.sample.sampler import Sampler, training_sampler
from gregale.programs.train.counts import DataPosition, PhaseTimer, Traffic
from gregale.programs.train.inspection import Inspector, QuantisationFigures
from gregale.programs.train.resume import Start, converted
from gregale.programs.train.step_log import Observers, StepLog, TooManySkipped
from gregale.runs.run_directory import RunDirectory
from gregale.storage import StoreError
from gregale.training.state import TrainState

HELP = "A lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help."


class Loop:
    """Training loop of a run; `evaluation` has the metrics of the last evaluation, empty without evaluation text."""

    def __init__(
        self,
        setup: Setup,
        corpus: Corpus,
        run: RunDirectory,
        checkpoints: Checkpoints,
        observers: Observers,
    ):
        self._setup, self._corpus, self._run = setup, corpus, run
        self._checkpoints, self._observers = checkpoints, observers
        self._progress, self._profile = observers.progress, observers.profile
        self._trained = {
            method.name: jax.jit(method.eval_model, compiler_options=setup.compiler_options)
            for method in (setup.psdp, setup.method)
        }
        text = evaluation_text(corpus)
        self._evaluate = Evaluator(setup, text, corpus.tokenizer.token_bytes) if text.first else None
        self._measure = QuantisationFigures(setup, text.first) if text.first and setup.config.reduce.measure else None
        self._tasks = tasks_of(setup, corpus.tokenizer, run, observers.report)
        self._inspectors: dict[str, Inspector] = {}
        self._spent = PhaseTimer()
        self._sampler = training_sampler(setup, corpus.tokenizer) if setup.config.samples.prompts else None
        self.evaluation: dict[str, float] = {}

    def run(self, start: Start, stop: StopRequest) -> int:
        """Train from `start` to the end, or until a stop request; return the number of steps done.

        In both cases the loop saves the state of the last step.

        Raises `UserError` if too many steps in a row, or all, were skipped, or if the state to save is not finite.
        """
        config = self._setup.config
        state, step = start.state, start.step
        traffic = Traffic(self._setup, step, start.replica_bytes)
        consumed = DataPosition(config.batch, step, start.examples)
        method = self._setup.method_after(step)
        take_step, compiled = self._setup.stepper(method), step
        log = StepLog(self._setup, self._observers, traffic, consumed, self._spent)
        rows = self._setup.batch_axes, self._setup.layout, start.examples
        try:
            with GlobalBatches(self._corpus.train, *rows) as batches:
                while step < config.steps and not stop.agreed(step):
                    if self._setup.method_after(step) is not method:
                        self._progress.at(step + 1, Phase.COMPILING)
                        state = converted(self._setup, state, step, method)
                        method = self._setup.method_after(step)
                        take_step, compiled = self._setup.stepper(method), step
                    self._trace(self._profile.begins_with(step + 1), self._profile.begin, log)
                    self._progress.at(step + 1, Phase.COMPILING if log.done <= compiled else Phase.TRAINING)
                    with self._profile.step(step + 1):
                        with self._spent.on("data_seconds"):
                            batch = next(batches)
                        figures = self._inspected(method, state, batch, step + 1, log)
                        with self._progress.waiting():  # a device's queue may be full
                            state, report = take_step(state, batch, step + 1)
                    step += 1
                    log.took(step, report, figures)
                    self._trace(self._profile.ends_with(step), self._profile.end, log)
                    evaluates, saves = (_is_due(step, each.every) for each in (config.evaluation, config.checkpoint))
                    if step < config.steps and (evaluates or saves):
                        log.catch_up()
                        if evaluates:
                            with self._spent.on("evaluation_seconds"):
                                self._evaluate_and_sample(method, state, step)
                        if saves:
                            self._save(method, state, step, traffic, consumed)
                        log.restart()
            log.catch_up()
        except TooManySkipped as error:
            raise UserError(f"{error} {after_skipping(state)}") from None
        if 0 < step == log.skipped:
            raise UserError(f"All {step} steps were skipped: in none of them were loss and gradient finite. {HELP}")
        self._save(method, state, step, traffic, consumed)
        if step == config.steps:
            self._evaluate_and_sample(method, state, step)
        return step

    def _inspected(
        self, method: Method, state: TrainState, batch: dict[str, NamedArray], step: int, log: StepLog
    ) -> dict[str, float]:
        """Return the metrics of each layer in the next step; empty if no inspection is due."""
        if not _is_due(step, self._setup.config.inspect.every):
            return {}
        log.catch_up()
        phase, inspector = self._progress.current.phase, self._inspectors.get(method.name)
        if inspector is None:
            self._progress.at(step, Phase.COMPILING)
            inspector = self._inspectors[method.name] = Inspector(self._setup, method)
        with self._spent.on("inspection_seconds"), self._progress.waiting():
            figures = inspector(state, batch)
        self._progress.at(step, phase)
        log.restart()
        return figures

    def _trace(self, is_due: bool, action: Callable[[], None], log: StepLog) -> None:
        """Begin or end a trace while the devices are idle; the step rate excludes that time."""
        if is_due:
            log.catch_up()
            action()
            log.restart()

    def _save(self, method: Method, state: TrainState, step: int, traffic: Traffic, consumed: DataPosition) -> None:
        """Save in the background."""
        self._progress.at(step, Phase.SAVING)
        counted = {"replica_bytes": traffic.bytes_sent(step), "examples": consumed.examples(step)}
        metadata = checkpoint_metadata(self._setup, self._corpus, method, step, counted)
        with self._spent.on("saving_seconds"):
            self._checkpoints.save(
                step, checkpointed(self._setup, method, state, step), metadata, self._observers.trackers.flush
            )

    def _evaluate_and_sample(self, method: Method, state: TrainState, step: int) -> None:
        config = self._setup.config
        self._progress.at(step, Phase.EVALUATING)
        model = self._trained[method.name](state.method)
        if self._evaluate is not None:
            self.evaluation = self._evaluate(model, config.evaluation.batches, self._progress.still)
        if self._tasks is not None:
            self.evaluation |= self._tasks(model, lambda done, total: self._progress.still())
        if self._measure is not None and method is self._setup.method:
            self.evaluation |= self._measure(state)
        if self._sampler is not None:
            self._sample(self._sampler, model, step)
        if self.evaluation:
            self._observers.trackers.log(step, self.evaluation)  # Last, because this line marks a run as complete.

    def _sample(self, sampler: Sampler, model, step: int) -> None:
        samples = self._setup.config.samples
        sampling, model = Sampling(temperature=samples.temperature, seed=step), sampler.prepared(model)
        added = sampler.texts(model, samples.prompts, samples.tokens, sampling)
        texts = [prompt + text for prompt, text in zip(samples.prompts, added, strict=True)]
        if jax.process_index() == 0:
            try:
                self._run.write_samples(step, texts)
            except (OSError, StoreError) as error:
                why = error.fact.rstrip(".") if isinstance(error, StoreError) else os_error_text(error)
                self._observers.report(f"The samples of step {step} could not be written: {why}.")


def after_skipping(state: TrainState) -> str:
    """Return the hint after many skipped steps: they change nothing, but an earlier update may not be finite."""
    if names := not_finite(state.method):
        return f"An update before them made {len(names)} arrays of the state infinite or NaN ({listed(names)}). {HELP}"
    return f"Nothing of these steps entered the parameters. {HELP}"


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
