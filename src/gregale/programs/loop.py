"""The training loop: hands steps to the device, reads their losses when they are there, evaluates, saves."""

from __future__ import annotations

import jax

from gregale.data.config import Corpus
from gregale.model.generate import Sampling
from gregale.programs.batches import GlobalBatches
from gregale.programs.evaluation import Evaluator
from gregale.programs.resume import checkpoint_metadata, converted, evaluated_model
from gregale.programs.sample import Sampler
from gregale.programs.setup import Setup
from gregale.programs.step_log import StepLog
from gregale.services.checkpoint.store import Checkpoints
from gregale.services.run_directory import RunDirectory
from gregale.services.signals import StopRequest
from gregale.services.tracking import Trackers
from gregale.training.state import TrainState


class Loop:
    """One run's loop; `evaluation` holds the figures of the last evaluation."""

    def __init__(self, setup: Setup, corpus: Corpus, run: RunDirectory, checkpoints: Checkpoints, trackers: Trackers):
        self._setup, self._corpus, self._run = setup, corpus, run
        self._checkpoints, self._trackers = checkpoints, trackers
        self._evaluate = Evaluator(setup, corpus.held_out, corpus.tokenizer.token_bytes)
        self.evaluation: dict[str, float] = {}

    def run(self, state: TrainState, first_step: int, stop: StopRequest) -> tuple[TrainState, int]:
        """Trains from `first_step` steps done to the end, or until a stop is asked for; returns the steps done.

        The state of the last step is saved either way.
        """
        config = self._setup.config
        step = first_step
        method = self._setup.method_after(step)
        take_step = self._setup.stepper(method)
        log = StepLog(self._setup, self._trackers, first_step)
        with GlobalBatches(self._corpus.train, self._setup.batch_axes, self._setup.layout, first_step) as batches:
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
                        self.save(state, step)
                    log.restart()
        log.catch_up()
        self.save(state, step)
        if step == config.steps:
            self._evaluate_and_sample(state, step)
        return state, step

    def save(self, state: TrainState, step: int) -> None:
        """Saves in the background."""
        self._checkpoints.save(step, state, checkpoint_metadata(self._setup, self._corpus, state))

    def _evaluate_and_sample(self, state: TrainState, step: int) -> None:
        config = self._setup.config
        model = evaluated_model(self._setup, state)
        self.evaluation = self._evaluate(model, config.evaluation.batches)
        self._trackers.log(step, self.evaluation)
        if config.samples.prompts:
            self._sample(model, step)

    def _sample(self, model, step: int) -> None:
        samples = self._setup.config.samples
        sampler = Sampler(self._setup, model, self._corpus.tokenizer)
        sampling = Sampling(temperature=samples.temperature, seed=step)
        texts = [prompt + sampler.text(prompt, samples.tokens, sampling) for prompt in samples.prompts]
        if jax.process_index() == 0:
            with self._run.samples.open("a") as file:
                file.write("".join(f"--- step {step}\n{text}\n" for text in texts))


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
