"""Callbacks, which a training loop calls at its events: the console, `metrics.jsonl` and trackers are callbacks.

    @CallbackConfig.register_subclass("largest_weight")
    @dataclass(frozen=True)
    class LargestWeightConfig(CallbackConfig):
        def build(self) -> Callback:
            return LargestWeight()

    class LargestWeight(Callback):
        def metrics(self, model, batch, execution):
            return {"largest_weight": jnp.max(jnp.abs(model.embedding.array))}

The loop's events for a step, in this order:

    before_step  (the loop waits for the devices if `waits_before`)
    the step starts; its compiled program computes `metrics`
    on_step of an earlier step, whose metrics have arrived
    after_step   (the loop waits for the devices if `waits_after`), and on_evaluation with its result
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import draccus
import numpy as np

from gregale.errors import UserError, plugin_errors
from gregale.settings import Settings
from gregale.storage import ObjectPath, StoragePath
from gregale.tracking.metrics import metric_of

Tree = Any
Metrics = Mapping[str, float | int | None]
"""Metrics by name; None (or NaN or an infinity) if there is no number."""


def finite(metrics: Metrics) -> dict[str, float | int]:
    """Return the metrics whose values are finite numbers."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class RunInfo:
    """The run as callbacks see it.

    - `config`: the resolved configuration in its JSON form
    - `resumed_from`: the step from which the run resumes, 0 for a new run; trackers remove metrics of later steps if
      they can
    - `is_writer`: whether this process writes the files of the run; callbacks are called in every process
    """

    directory: StoragePath
    name: str
    config: Mapping[str, Any]
    resumed_from: int = 0
    is_writer: bool = True

    @property
    def files(self) -> Path:
        """The folder for files of trackers: the run directory, or `trackers/NAME` here for a run in a store."""
        if not isinstance(self.directory, ObjectPath):
            return self.directory
        folder = Path("trackers") / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass
class StepContext:
    """The time between two steps, in which the devices are idle.

    - `step`: the step that follows in `before_step`, the step that is done in `after_step`
    - `state`: the `TrainState`, for reading; the next step overwrites its arrays, so copy what you keep
    - `method`: the synchronisation method that takes the steps
    - `batch`: the batch of the step that follows; None in `after_step`
    - `trained`: makes the model to evaluate of the method's state
    - `stop`: stop(reason) ends the run as complete, as its last step does; the reason is a text of one line
    - `check`: to be called between parts of long work in `after_step`, equally often in every process: after a signal
      it leaves the callback, which the next start calls again
    """

    step: int
    state: Any
    method: Any
    batch: Tree
    trained: Callable[[Tree], Tree]
    stop: Callable[[str], None]
    check: Callable[[], None] = lambda: None

    @cached_property
    def model(self) -> Tree:
        """The model to evaluate; for DiLoCo the model of the outer parameters. All callbacks of a pause share it."""
        return self.trained(self.state.method)


class Callback:
    """Code that the training loop calls at its events; each method does nothing unless it is overridden.

    Every process of a run makes the same calls in the same order, in the thread of the loop, except `on_checkpoint`.
    A `UserError` of a callback ends the run with its text; any other exception ends it with the exception's place. An
    exception of `on_checkpoint` is reported, and the run continues.

    - `seconds`: the metric that counts the seconds of `before_step` and `after_step`
    """

    seconds: ClassVar[str] = "callback_seconds"

    def metrics(self, model: Tree, batch: Tree, execution: Any) -> Mapping[str, Any]:
        """Return metrics that the step's compiled program computes: scalar arrays by name.

        - `model`: with the parameters before the step
        - `batch`: arrays [batch, position]; of one replica if replicas train separately, and the loop logs the mean
          over replicas
        - `execution`: for `model.loss(batch, execution)` and the like
        """
        del model, batch, execution
        return {}

    def on_start(self, run: RunInfo) -> None:
        """Open files and sessions, before the first step."""

    def waits_before(self, step: int) -> bool:
        """Return whether the loop calls `before_step` for this step; it waits until the devices are idle."""
        del step
        return False

    def before_step(self, pause: StepContext) -> Metrics:
        """Return metrics to log with the step that follows."""
        del pause
        return {}

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a logged step. The devices already run the next step, so do not wait for them."""

    def waits_after(self, step: int) -> bool:
        """Return whether the loop calls `after_step` for this step; it waits until the devices are idle."""
        del step
        return False

    def after_step(self, pause: StepContext) -> Metrics:
        """Return metrics to log as an evaluation."""
        del pause
        return {}

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of an evaluation, or of a callback's `after_step`."""

    def on_checkpoint(self, step: int) -> None:
        """Take the step of a checkpoint that is valid now; called in process 0, in the thread that saves."""

    def on_end(self, step: int) -> None:
        """Take the last step, after its checkpoint and evaluation; not called if an error ends the run."""

    def close(self) -> None:
        """Close files and sessions, also after an error."""


@dataclass(frozen=True)
class CallbackConfig(Settings, draccus.ChoiceRegistry):
    """A callback of the configuration's `callbacks`; plugins register the choices."""

    def build(self) -> Callback:
        """Return the callback; it opens files and sessions in `on_start`, because `gregale plan` builds it too."""
        raise UserError(f"callbacks: {type(self).__name__} has no method `build`, which returns the callback.")


class Callbacks:
    """The callbacks of a run, each called in order; `call` has the errors."""

    def __init__(self, callbacks: Sequence[Callback], flush: Callable[[], None] = lambda: None):
        self._all, self._flush = tuple(callbacks), flush

    def on_start(self, run: RunInfo) -> None:
        for callback in self._all:
            call(callback, "on_start", run)

    def on_step(self, step: int, metrics: Metrics) -> None:
        for callback in self._all:
            call(callback, "on_step", step, metrics)

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        for callback in self._all:
            call(callback, "on_evaluation", step, metrics)

    def on_end(self, step: int) -> None:
        for callback in self._all:
            call(callback, "on_end", step)

    def flush(self) -> None:
        """Write the metrics that belong to a checkpoint, before its commit; raise `UserError` after a failure."""
        self._flush()

    def close(self) -> None:
        """Close every callback, the last first, even if one of them fails."""
        with ExitStack() as stack:
            for callback in self._all:
                stack.callback(call, callback, "close")

    def __enter__(self) -> "Callbacks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(callback: Callback, event: str, *arguments: Any) -> Any:
    """Return the result of a callback's event; an exception of a plugin's callback becomes a `UserError`."""
    with plugin_errors(f"callbacks: {type(callback).__name__}.{event}", type(callback)):
        return getattr(callback, event)(*arguments)


def own_metrics(callback: Callback, event: str, *arguments: Any) -> dict[str, Any]:
    """Return the metrics that an event of a plugin's callback returns, as arrays without axes.

    Raises `UserError` for anything but numbers by name, and for the name of a metric that there is already.
    """
    what, found = f"callbacks: {type(callback).__name__}.{event}", call(callback, event, *arguments)
    if found is None and event != "metrics":
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"{what} returns {type(found).__name__}; it has to return a mapping of names to numbers.")
    metrics = {}
    for name, value in found.items():
        if not isinstance(name, str) or not name or name == "step" or metric_of(name) is not None:
            raise UserError(f"{what} returns {name!r}, which is no name or that of another metric; choose another.")
        array = getattr(value, "array", value)
        if np.shape(array) != () or (not hasattr(array, "dtype") and not isinstance(array, int | float)):
            raise UserError(
                f"{what} returns {name!r} of the type {type(value).__name__} and the shape {np.shape(array)}; give a "
                "number, such as a mean."
            )
        metrics[name] = array
    return metrics
