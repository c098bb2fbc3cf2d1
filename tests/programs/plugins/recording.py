"""A plugin of tests: callbacks that record the loop's events, and one that fails."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gregale.settings import setting
from gregale.tracking.callback import Callback, CallbackConfig

EVENTS: list[tuple] = []


class Recorder(Callback):
    """Records each event, and the largest weight before and after two steps."""

    def metrics(self, model, batch, execution):
        mean = jnp.mean(batch["tokens"].array.astype(jnp.float32))
        return {"largest_weight": jnp.max(jnp.abs(model.embedding.array)), "token_mean": mean}

    def on_start(self, run):
        EVENTS[:] = [("start", run.name, run.resumed_from, run.is_writer)]

    def waits_before(self, step):
        EVENTS.append(("next", step))
        return step == 3

    def before_step(self, pause):
        EVENTS.append(("before", pause.step, float(jnp.mean(pause.batch["tokens"].array))))
        return {"own_before": largest(pause.model)}

    def on_step(self, step, metrics):
        EVENTS.append(("step", step))

    def waits_after(self, step):
        return step == 2

    def after_step(self, pause):
        EVENTS.append(("after", pause.step, pause.batch))
        return {"own_after": largest(pause.model)}

    def on_evaluation(self, step, metrics):
        EVENTS.append(("evaluation", step, *metrics))

    def on_end(self, step):
        EVENTS.append(("end", step))

    def close(self):
        EVENTS.append(("close",))


def largest(model) -> float:
    return float(np.max(np.abs(jax.device_get(model.embedding.array))))


@CallbackConfig.register_subclass("recorder")
@dataclass(frozen=True)
class RecorderConfig(CallbackConfig):
    def build(self):
        return Recorder()


class Failing(Callback):
    """Fails as its configuration says, or as `later`: after the steps are compiled, which all of these ways share."""

    later = ""

    def __init__(self, how: str):
        self._how = how

    def metrics(self, model, batch, execution):
        given = {"taken": {"step": 1.0}, "shape": {"mine": jnp.zeros(3)}, "nothing": None}
        return given.get(self._how, {})

    def waits_after(self, step):
        return self.later == "text"

    def after_step(self, pause):
        return {"mine": "text"}

    def on_checkpoint(self, step):
        raise ZeroDivisionError("no checkpoints.")

    def on_step(self, step, metrics):
        if self.later == "raises":
            raise ZeroDivisionError("no steps.")


@CallbackConfig.register_subclass("failing")
@dataclass(frozen=True)
class FailingConfig(CallbackConfig):
    how: str = setting("", "taken, shape, nothing or build")

    def build(self):
        return None if self.how == "build" else Failing(self.how)
