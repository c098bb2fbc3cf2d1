"""The steps of a method's period, and what a device sends in them over the slow axis for the parameters."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from gregale.axes.layout import Tree
from gregale.communication.quantised import Reducer
from gregale.methods.schedule import Fragment, Schedule, StepFragments, sizes_of

SYNCHRONISE = "synchronise"
STEP_KINDS = {(True, False): "send", (False, True): "apply", (True, True): "send_and_apply"}


class StepKind(NamedTuple):
    """A kind of steps with actions beside their update, described by one of them."""

    step: int  # the number of the step of this kind that sends most
    share: float  # of all steps


@dataclass(frozen=True)
class Traffic:
    """The steps of a period, and a device's bytes over the slow axis in a step.

    - `average`, `most`: of a period's steps
    - `kinds`: by the name of its program, each kind of steps with actions beside their update
    - `period`: number of steps after which they repeat
    """

    average: float
    most: float
    kinds: dict[str, StepKind] = field(default_factory=dict)
    period: int = 1

    @staticmethod
    def of_every_step(reducer: Reducer, parameters: Tree) -> "Traffic":
        """Return the traffic of a method that reduces and gathers everything in each step, as PSDP does."""
        sent = float(reducer.bytes_sent(parameters))
        return Traffic(sent, sent)

    @staticmethod
    def of_schedule(schedule: Schedule, reducer: Reducer, parameters: Tree) -> "Traffic":
        """Return the traffic of a method that sends and applies fragments.

        The period is not the first, which is incomplete. There are `synchronise`: SEND and APPLY after a step (tau =
        0); `send`, `apply`, `send_and_apply`: in a step. If fragments differ in size, the step is the one that sends
        most of its kind.
        """
        sent = _Sent(schedule, reducer, parameters)
        steps = [(step, schedule.fragments_at(step)) for step in range(2 * schedule.period, 3 * schedule.period)]
        counts: Counter[str] = Counter()
        largest: dict[str, tuple[float, int]] = {}
        for step, due in steps:
            if due != StepFragments(None, None):
                both = due.send is not None, due.apply is not None
                name = SYNCHRONISE if schedule.delay == 0 else STEP_KINDS[both]
                counts[name] += 1
                largest[name] = max(largest.get(name, (0.0, step)), (sent.over_axis(due), step), key=lambda one: one[0])
        kinds = {name: StepKind(step, counts[name] / schedule.period) for name, (_, step) in largest.items()}
        every = [sent.over_axis(due) for _, due in steps]
        return Traffic(sum(every) / len(every), max(every), kinds, schedule.period)


@dataclass(frozen=True)
class _Sent:
    """A device's bytes over the axis for fragments; those with equal numbers of rows in each stack send the same."""

    schedule: Schedule
    reducer: Reducer
    parameters: Tree
    known: dict[tuple, int] = field(default_factory=dict)

    def over_axis(self, due: StepFragments) -> float:
        phases = (("send", due.send, self.reducer.reduce_bytes), ("apply", due.apply, self.reducer.gather_bytes))
        return sum(self._of(name, fragment, count) for name, fragment, count in phases if fragment is not None)

    def _of(self, name: str, index: int, count: Callable[[Tree], int]) -> int:
        fragment = Fragment.at(self.schedule, index, 0)
        assert fragment is not None
        key = name, sizes_of(fragment.rows or {})
        if key not in self.known:
            self.known[key] = count(jax.eval_shape(fragment.take, self.parameters))
        return self.known[key]
