"""The callbacks of a run that evaluate, continue the prompts of `samples`, and save; and the text of the result."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from gregale.atomic_files import os_error_text
from gregale.checkpoint.multihost import first_message
from gregale.checkpoint.store import Checkpoints
from gregale.data.preparation import Corpus
from gregale.distributed.liveness import Elapsed, Phase
from gregale.errors import UserError
from gregale.evaluation.bigram import bigram_bits_per_byte
from gregale.inference.generate import Sampling
from gregale.programs.runtime.evaluation import format_losses, format_tasks, tasks_of
from gregale.programs.runtime.sampler import Sampler, training_sampler
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import checkpoint_metadata, checkpointed
from gregale.programs.train.exports import Exports
from gregale.programs.train.inspection import QuantisationFigures, is_due
from gregale.programs.train.stages import PreparedStage
from gregale.programs.train.step_log import DataPosition, Observers, Traffic
from gregale.programs.train.steps import Steps
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.storage import StoreError
from gregale.tracking.callback import Callback, Metrics, Pause, call

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

    def after_step(self, pause: Pause) -> Metrics:
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

    def after_step(self, pause: Pause) -> Metrics:
        self._save(pause, {}, self._observers.callbacks.flush)
        return {}

    def _save(self, pause: Pause, counted: Mapping[str, Any], beside: Callable[[], object]) -> None:
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
