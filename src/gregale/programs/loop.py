"""The training loop: hands steps to the device, reads their losses when they are there, evaluates, saves."""

from __future__ import annotations

import time
from collections import deque

import jax
import numpy as np

from gregale.data.config import Corpus
from gregale.errors import UserError
from gregale.model.generate import Sampling
from gregale.programs.batches import GlobalBatches
from gregale.programs.evaluation import Evaluator
from gregale.programs.sample import Sampler
from gregale.programs.setup import Setup
from gregale.services.checkpoint.store import Checkpoints
from gregale.services.run_directory import RunDirectory
from gregale.services.signals import StopRequest
from gregale.services.tracking import Rate, Trackers
from gregale.training.state import Report, TrainState

STEPS_AHEAD = 2  # steps handed to the device before the oldest one's loss is read


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
        take_step = self._setup.jitted_step()
        step = first_step
        log = StepLog(self._setup, self._trackers, first_step)
        with GlobalBatches(self._corpus.train, self._setup.batch_axes, self._setup.layout, first_step) as batches:
            while step < config.steps and not stop.agreed(step):
                state, report = take_step(state, next(batches))
                step += 1
                log.took(step, report)
                if step < config.steps and _is_due(step, config.evaluation.every):
                    log.catch_up()
                    self._evaluate_and_sample(state, step)
                    log.restart()
                if _is_due(step, config.checkpoint.every):
                    log.catch_up()
                    self.save(state, step)
        log.catch_up()
        self.save(state, step)
        if step == config.steps:
            self._evaluate_and_sample(state, step)
        return state, step

    def save(self, state: TrainState, step: int) -> None:
        """Saves in the background."""
        self._checkpoints.save(step, state, {"data": self._corpus.fingerprint})

    def _evaluate_and_sample(self, state: TrainState, step: int) -> None:
        config = self._setup.config
        model = self._setup.method.trained(state.method)
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


class StepLog:
    """The figures of steps, read from the device a few steps late so that the loop never waits for a loss."""

    def __init__(self, setup: Setup, trackers: Trackers, first_step: int):
        self._setup, self._trackers = setup, trackers
        self._pending: deque[tuple[int, Report]] = deque()
        self._done = first_step
        self._skipped: int | None = None
        self.restart()

    def restart(self) -> None:
        """Begins to measure anew, so that time spent on other things does not count."""
        self._rate = Rate(time.monotonic(), self._done)

    def took(self, step: int, report: Report) -> None:
        """Takes the report of a step that was handed to the device."""
        self._pending.append((step, report))
        while len(self._pending) > STEPS_AHEAD:
            self._log(*self._pending.popleft())

    def catch_up(self) -> None:
        """Waits for all steps so far."""
        while self._pending:
            self._log(*self._pending.popleft())

    def _log(self, step: int, report: Report) -> None:
        config = self._setup.config
        metrics, skipped, in_a_row = jax.device_get(report)
        self._rate.completed(step, config.batch.tokens, time.monotonic())
        self._done = step
        if in_a_row >= config.max_skipped:
            raise UserError(
                f"max_skipped: loss or gradient was not finite in the last {in_a_row} steps (step {step}: loss "
                f"{metrics.loss}, gradient norm {metrics.grad_norm}). Nothing of these steps entered the parameters. A "
                f"lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help."
            )
        if step % config.log_every and step != config.steps:
            return
        values = {
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": self._setup.learning_rate(step - int(skipped) + bool(in_a_row)),
            "tokens": step * config.batch.tokens,
            "tokens_per_second": self._rate.tokens_per_second,
            "step_seconds": self._rate.step_seconds,
        }
        self._trackers.log(step, values | ({"skipped": int(skipped)} if np.any(skipped) else {}))
