"""Learning-rate schedules: a warmup, then one of four shapes."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus
import jax
import jax.numpy as jnp
import optax

from gregale.errors import KeyedError
from gregale.settings import LARGEST_WHOLE, Range, Settings, at_least, between, in_steps, setting, whole

LONGEST = float(LARGEST_WHOLE)  # steps, which may also be given as a fraction


@dataclass(frozen=True)
class ScheduleConfig(Settings, draccus.ChoiceRegistry):
    """The learning rate over a run, or over a stage of it: a warmup, then the shape that `type` names.

    In the warmup of w steps the rate at step t (counted from 0 at `begin`) is
    `peak * (initial + (1 - initial) * (t + 1) / (w + 1))`, so that no step has a rate of zero; step w has the peak.
    """

    is_constant: ClassVar[bool] = False  # the rate stays after the warmup

    warmup: float = setting(
        0.0,
        "steps of warmup; below 1: a fraction of the run",
        range=between(0, LONGEST),
        aliases=("num_warmup_steps", "warmup_iters", "warmup_fraction", "warmup"),
    )
    begin: int = setting(0, "step after which it begins; of a stage: the stage's", range=whole(0), by_topic=True)
    end: int | None = setting(None, "step at which it ends; null: the end of the run", range=whole(1), by_topic=True)
    initial: float = setting(
        0.0, "rate from which the warmup rises, divided by the peak", range=at_least(0), by_topic=True
    )

    @classmethod
    def default_choice_name(cls) -> str:
        return "cosine"

    def build(self, peak: float, steps: int) -> optax.Schedule:
        """Return the schedule step -> learning rate.

        - `peak`: the learning rate after the warmup
        - `steps`: length of the whole run, warmup included

        Raises `UserError` if the parts of the schedule are longer than the run.
        """
        warmup, steps = self._lengths(steps)
        schedule = self.after_warmup(peak, steps - warmup, in_steps_of=steps)
        if warmup:
            first = peak * (self.initial * warmup + 1) / (warmup + 1)
            schedule = optax.join_schedules([optax.linear_schedule(first, peak, warmup), schedule], [warmup])
        return (lambda step: schedule(jnp.maximum(step - self.begin, 0))) if self.begin else schedule

    def fraction(self, step: int, steps: int) -> float | None:
        """Return the learning rate of a step divided by the peak, as a number; None without a closed form.

        The arguments and errors are those of `build`.
        """
        (warmup, steps), done = self._lengths(steps), max(step - self.begin, 0)
        if done < warmup:
            return self.initial + (1 - self.initial) * (done + 1) / (warmup + 1)
        return self.fraction_after_warmup(done - warmup, steps - warmup, in_steps_of=steps)

    def _lengths(self, steps: int) -> tuple[int, int]:
        """Return the steps of the warmup, and of the whole schedule."""
        end = steps if self.end is None else self.end
        if self.begin >= end:
            raise KeyedError("begin", f"is {self.begin}", f", but the schedule ends at step {end}.")
        length = end - self.begin
        warmup = in_steps(self.warmup, length)
        if warmup >= length:
            raise KeyedError(
                "warmup",
                f"is {self.warmup:g}",
                f" = {warmup} steps, but the optimizer takes only {length} in the schedule: nothing would be left "
                f"after the warmup. Less than {length} steps, or a fraction below 1, would work.",
            )
        return warmup, length

    def fraction_after_warmup(self, step: int, steps: int, in_steps_of: int) -> float | None:
        """Return `after_warmup` of a step divided by the peak, as a number; None without a closed form."""
        del step, steps, in_steps_of
        return None

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        """Return the shape after the warmup: `steps` steps of a run of `in_steps_of`."""
        raise TypeError(f"{type(self).__name__} has no shape of its own; choose a schedule by its type")


def _final(default: float):
    """Return the field that several shapes share, with a default for each."""
    return setting(
        default,
        "learning rate at the end, divided by the peak",
        range=between(0, 1),
        aliases=("min_ratio", "final_ratio", "final_lr", "end_lr"),
    )


@ScheduleConfig.register_subclass("constant")
@dataclass(frozen=True)
class ConstantSchedule(ScheduleConfig):
    """The peak, constant."""

    is_constant = True

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.constant_schedule(peak)

    def fraction_after_warmup(self, step: int, steps: int, in_steps_of: int) -> float:
        return 1.0


@ScheduleConfig.register_subclass("linear")
@dataclass(frozen=True)
class LinearSchedule(ScheduleConfig):
    """A straight line from the peak to `final * peak` at the end of the run."""

    final: float = _final(0.0)

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final, steps)

    def fraction_after_warmup(self, step: int, steps: int, in_steps_of: int) -> float:
        return 1 - (1 - self.final) * min(step / steps, 1)


@ScheduleConfig.register_subclass("cosine")
@dataclass(frozen=True)
class CosineSchedule(ScheduleConfig):
    """Half a cosine from the peak to `final * peak` at the end of the run (Loshchilov and Hutter, 1608.03983)."""

    final: float = _final(0.1)

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, steps, alpha=self.final)

    def fraction_after_warmup(self, step: int, steps: int, in_steps_of: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2


@ScheduleConfig.register_subclass("wsd")
@dataclass(frozen=True)
class WarmupStableDecaySchedule(ScheduleConfig):
    """Warmup, then the peak, then a decay to `final * peak` in the last part of the run.

    A run can be prolonged from a checkpoint before the decay (Hu et al., MiniCPM, 2404.06395). With x from 0 to 1 in
    it the rate is `1 - (1 - final) x` or `1 - (1 - final) sqrt(x)` (Hagele et al., 2405.18392) of the peak.
    """

    decay: float = setting(
        0.2,
        "steps of the decay at the end; below 1: a fraction of the run",
        range=Range(0, LONGEST, above=True),
        aliases=("decay_steps", "cooldown"),
    )
    shape: str = setting("linear", "of the decay", choices=("linear", "sqrt"), aliases=("decay_type", "decay_style"))
    final: float = _final(0.0)

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        decay = in_steps(self.decay, in_steps_of)
        if decay > steps:
            raise KeyedError(
                "decay",
                f"is {self.decay:g}",
                f" = {decay} steps, but only {steps} of {in_steps_of} are left after the warmup ({in_steps_of} - "
                f"{in_steps_of - steps} = {steps}); a decay of at most {steps} would work, or a shorter warmup.",
            )
        length = max(decay, 1)
        line = optax.linear_schedule(peak, peak * self.final, length)

        def root(step: Any) -> jax.Array:
            return peak * (1 - (1 - self.final) * jnp.sqrt(jnp.clip(step / length, 0, 1)))

        falling = root if self.shape == "sqrt" else line
        return optax.join_schedules([optax.constant_schedule(peak), falling], [steps - decay])

    def fraction_after_warmup(self, step: int, steps: int, in_steps_of: int) -> float:
        decay = max(in_steps(self.decay, in_steps_of), 1)
        done = min(max(step - steps + decay, 0) / decay, 1)
        return 1 - (1 - self.final) * (math.sqrt(done) if self.shape == "sqrt" else done)
