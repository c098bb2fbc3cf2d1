"""The training loop: hands steps to the device, reads their losses when they are there, evaluates, saves."""

from __future__ import annotations

from collections.abc import Callable

import jax

from gregale.data.config import Corpus
from gregale.errors import UserError
from gregale.files import reason
from gregale.model.generate import Sampling
from gregale.programs.run.batches import GlobalBatches
from gregale.programs.run.evaluation import Evaluator
from gregale.programs.run.setup import Setup
from gregale.programs.sample import Sampler
from gregale.programs.train.quantisation import QuantisationFigures
from gregale.programs.train.resume import Start, checkpoint_metadata, converted, evaluated_model
from gregale.programs.train.step_log import StepLog, TooManySkipped
from gregale.programs.train.traffic import Traffic
from gregale.services.checkpoint.finite import listed, not_finite
from gregale.services.checkpoint.store import Checkpoints
from gregale.services.run_directory import RunDirectory
from gregale.services.signals import StopRequest
from gregale.services.tracking import Trackers
from gregale.training.state import TrainState

HELP = "A lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help."


class Loop:
    """One run's loop; `evaluation` holds the figures of the last evaluation."""

    def __init__(
        self,
        setup: Setup,
        corpus: Corpus,
        run: RunDirectory,
        checkpoints: Checkpoints,
        trackers: Trackers,
        report: Callable[[str], None],
    ):
        """`report`: told in one line of what fails and does not end the run."""
        self._setup, self._corpus, self._run = setup, corpus, run
        self._checkpoints, self._trackers, self._report = checkpoints, trackers, report
        self._evaluate = Evaluator(setup, corpus.held_out, corpus.tokenizer.token_bytes)
        self._measure = QuantisationFigures(setup, corpus.held_out) if setup.config.reduce.measure else None
        self.evaluation: dict[str, float] = {}

    def run(self, start: Start, stop: StopRequest) -> int:
        """Trains from `start` to the end, or until a stop is asked for; returns the steps done.

        The state of the last step is saved either way.

        Raises `UserError` if too many steps in a row, or all, were skipped, or if the state to be saved is not finite.
        """
        config = self._setup.config
        state, step = start.state, start.step
        traffic = Traffic(self._setup, step, start.replica_bytes)
        method = self._setup.method_after(step)
        take_step = self._setup.stepper(method)
        log = StepLog(self._setup, self._trackers, traffic)
        try:
            with GlobalBatches(self._corpus.train, self._setup.batch_axes, self._setup.layout, step) as batches:
                while step < config.steps and not stop.agreed(step):
                    if self._setup.method_after(step) is not method:
                        method = self._setup.method_after(step)
                        state, take_step = converted(self._setup, state, step), self._setup.stepper(method)
                    state, report = take_step(state, next(batches), step + 1)
                    step += 1
                    log.took(step, report)
                    evaluates, saves = (_is_due(step, each.every) for each in (config.evaluation, config.checkpoint))
                    if step < config.steps and (evaluates or saves):
                        log.catch_up()
                        if evaluates:
                            self._evaluate_and_sample(state, step)
                        if saves:
                            self._save(state, step, traffic)
                        log.restart()
            log.catch_up()
        except TooManySkipped as error:
            raise UserError(f"{error} {after_skipping(state)}") from None
        if 0 < step == log.skipped:
            raise UserError(f"All {step} steps were skipped: in none of them were loss and gradient finite. {HELP}")
        self._save(state, step, traffic)
        if step == config.steps:
            self._evaluate_and_sample(state, step)
        return step

    def _save(self, state: TrainState, step: int, traffic: Traffic) -> None:
        """Saves in the background."""
        metadata = checkpoint_metadata(self._setup, self._corpus, state, traffic.bytes_sent(step))
        self._checkpoints.save(step, state, metadata)

    def _evaluate_and_sample(self, state: TrainState, step: int) -> None:
        config = self._setup.config
        model = evaluated_model(self._setup, state)
        self.evaluation = self._evaluate(model, config.evaluation.batches)
        if self._measure is not None and self._setup.method_after(step) is self._setup.method:
            self.evaluation |= self._measure(state)
        if config.samples.prompts:
            self._sample(model, step)
        self._trackers.log(step, self.evaluation)  # last: with this line a run is complete

    def _sample(self, model, step: int) -> None:
        samples = self._setup.config.samples
        sampler = Sampler(self._setup, model, self._corpus.tokenizer)
        sampling = Sampling(temperature=samples.temperature, seed=step)
        texts = [prompt + sampler.text(prompt, samples.tokens, sampling) for prompt in samples.prompts]
        if jax.process_index() == 0:
            try:
                self._run.write_samples(step, texts)
            except OSError as error:
                self._report(f"The samples of step {step} could not be written: {reason(error)}.")


def after_skipping(state: TrainState) -> str:
    """What many skipped steps mean for the state that they left: skipped steps change nothing, but one before may."""
    if names := not_finite(state.method):
        return f"An update before them made {len(names)} arrays of the state infinite or NaN ({listed(names)}). {HELP}"
    return f"Nothing of these steps entered the parameters. {HELP}"


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
