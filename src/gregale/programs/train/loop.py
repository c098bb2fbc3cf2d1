"""Provides the training loop: the next batch, its step, and the events of callbacks."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from gregale.checkpoint.files import not_finite
from gregale.distributed.liveness import Phase
from gregale.distributed.signals import Cut
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.programs.train.evaluation import Evaluation, Saving
from gregale.programs.train.inspection import Inspection
from gregale.programs.train.stages import PreparedStage
from gregale.programs.train.step_log import Observers, StepLog, TooManySkipped
from gregale.programs.train.steps import Batch, Steps
from gregale.tracking.callback import Callback, Pause, own_metrics
from gregale.training.state import TrainState

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
                    log.took(steps.step, report, inspected)
                    steps.between()
                    self._after_step(self._waiting)
            log.catch_up()
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
            self._log.catch_up()
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
            self._log.catch_up()
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

    def _pause(self, step: int, batch: Batch | None = None) -> Pause:
        method = self._steps.method
        state, program, setup = self._steps.state, self._stage.trained(method), self._stage.setup

        def trained(of_method: Any) -> Any:
            return setup.holding(program(of_method), state.frozen)[0]

        return Pause(step, state, method, batch, trained, self._steps.stop.ask, self._steps.stop.check)

    def _call(self, event: str, callback: Callback, pause: Pause) -> dict[str, Any]:
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
