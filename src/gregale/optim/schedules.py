"""Learning-rate schedules: a warmup, then one of four shapes."""

from dataclasses import dataclass

import draccus
import optax

from gregale.errors import KeyedError
from gregale.settings import LARGEST_WHOLE, Range, Settings, between, in_steps, setting

LONGEST = float(LARGEST_WHOLE)  # steps, which may also be given as a fraction


@dataclass(frozen=True)
class ScheduleConfig(Settings, draccus.ChoiceRegistry):
    """The learning rate over a run: a warmup, then the shape that `type` names.

    In the warmup of w steps the rate at step t (counted from 0) is `peak * (t + 1) / (w + 1)`, so that no step has a
    rate of zero; step w has the peak.
    """

    warmup: float = setting(
        0.0,
        "steps of warmup; below 1: a fraction of the run",
        range=between(0, LONGEST),
        aliases=("num_warmup_steps", "warmup_ratio", "warmup_iters", "warmup_fraction"),
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
        warmup = in_steps(self.warmup, steps)
        if warmup >= steps:
            raise KeyedError(
                "warmup",
                f"is {self.warmup:g}",
                f" = {warmup} steps, but the optimizer takes only {steps} in the run: nothing would be left after the "
                f"warmup. Less than {steps} steps, or a fraction below 1, would work.",
            )
        body = self.after_warmup(peak, steps - warmup, in_steps_of=steps)
        if not warmup:
            return body
        return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), body], [warmup])

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        """Return the shape after the warmup: `steps` steps of a run of `in_steps_of`."""
        raise TypeError(f"{type(self).__name__} has no shape of its own; choose a schedule by its type")


def _final(default: float):
    """Return the field that several shapes share, with a default for each."""
    return setting(
        default,
        "learning rate at the end, divided by the peak",
        range=between(0, 1),
        aliases=("min_ratio", "final_ratio"),
    )


@ScheduleConfig.register_subclass("constant")
@dataclass(frozen=True)
class ConstantSchedule(ScheduleConfig):
    """The peak, constant."""

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.constant_schedule(peak)


@ScheduleConfig.register_subclass("linear")
@dataclass(frozen=True)
class LinearSchedule(ScheduleConfig):
    """A straight line from the peak to `final * peak` at the end of the run."""

    final: float = _final(0.0)

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final, steps)


@ScheduleConfig.register_subclass("cosine")
@dataclass(frozen=True)
class CosineSchedule(ScheduleConfig):
    """Half a cosine from the peak to `final * peak` at the end of the run (Loshchilov and Hutter, 1608.03983)."""

    final: float = _final(0.1)

    def after_warmup(self, peak: float, steps: int, in_steps_of: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, steps, alpha=self.final)


@ScheduleConfig.register_subclass("wsd")
@dataclass(frozen=True)
class WarmupStableDecaySchedule(ScheduleConfig):
    """Warmup, then the peak, then a straight line to `final * peak` in the last part of the run.

    A run can be prolonged from a checkpoint before the decay (Hu et al., MiniCPM, 2404.06395).
    """

    decay: float = setting(
        0.2,
        "steps of the decay at the end; below 1: a fraction of the run",
        range=Range(0, LONGEST, above=True),
        aliases=("decay_steps", "cooldown"),
    )
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
        line = optax.linear_schedule(peak, peak * self.final, max(decay, 1))
        return optax.join_schedules([optax.constant_schedule(peak), line], [steps - decay])
