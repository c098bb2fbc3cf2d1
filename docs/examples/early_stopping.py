"""A callback: it ends a run whose held-out loss falls no more. Its count begins anew when a run resumes."""

import math
from dataclasses import dataclass

from gregale import Callback, CallbackConfig
from gregale.settings import at_least, setting, whole


@CallbackConfig.register_subclass("early_stopping")
@dataclass(frozen=True)
class EarlyStoppingConfig(CallbackConfig):
    """Ends a run after evaluations without a smaller held-out loss."""

    patience: int = setting(3, "number of evaluations in a row without a smaller loss", range=whole(1))
    margin: float = setting(0.0, "a loss counts as smaller if it is less than the best one by this", range=at_least(0))

    def build(self) -> Callback:
        return EarlyStopping(self)


class EarlyStopping(Callback):
    def __init__(self, config: EarlyStoppingConfig):
        self._config, self._best, self._worse = config, math.inf, 0

    def on_evaluation(self, step, metrics):
        if "eval_loss" not in metrics:
            return
        if metrics["eval_loss"] < self._best - self._config.margin:
            self._best, self._worse = metrics["eval_loss"], 0
        else:
            self._worse += 1

    def waits_after(self, step):
        return self._worse >= self._config.patience

    def after_step(self, pause):
        pause.stop(f"{self._worse} evaluations in a row have found no eval_loss below {self._best:.4f}")
