"""The steps at which each fragment of Streaming DiLoCo is sent and applied, as functions (arXiv 2501.18512)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gregale.axes.layout import LAYERS
from gregale.axes.parameters import layer_numbers
from gregale.errors import UserError

PATTERNS = ("sequential", "strided")


class StepFragments(NamedTuple):
    """The indices of the fragments that a step sends and applies; None for none."""

    send: int | None
    apply: int | None


@dataclass(frozen=True)
class Schedule:
    """The outer schedule: P fragments, each sent exactly every H steps and applied tau steps later.

    Fragment 0 has all arrays without a `layers` axis, fragments 1 to P - 1 are groups of layers; with P = 1 fragment 0
    has all arrays (DiLoCo). The groups of layers are sent first. Without arrays outside of layers (adapters) fragment 0
    is a group of layers too.

    - `period`: H, steps between two sends of a fragment
    - `fragments`: P
    - `delay`: tau, steps from a send to its application
    - `layers`: number of layers
    - `pattern`: `sequential`, each fragment consecutive layers, or `strided`, every (P - 1)-th
    - `order`: the structure of each layer, see `gregale.axes.parameters`; empty: one structure
    - `only_layers`: whether all arrays have a `layers` axis
    """

    period: int
    fragments: int = 1
    delay: int = 0
    layers: int = 1
    pattern: str = "strided"
    order: tuple[int, ...] = ()
    only_layers: bool = False

    def __post_init__(self):
        if self.period < 1:
            raise UserError(f"sync.period is {self.period}; replicas are synchronised every so many steps, at least 1.")
        if not 0 <= self.delay < self.period:
            raise UserError(
                f"sync.delay is {self.delay} and sync.period is {self.period}: a fragment has to be applied before it "
                f"is sent again, so the delay is at least 0 and at most {self.period - 1}."
            )
        if self.only_layers and self.fragments > self.layers:
            raise UserError(
                f"sync.fragments is {self.fragments}: adapters are in layers only, so there can be at most "
                f"{self.layers} fragments, one for each layer."
            )
        if not 1 <= self.fragments <= self.layers + 1:
            raise UserError(
                f"sync.fragments is {self.fragments}: one fragment is all that is not in layers, and the others share "
                f"the {self.layers} layers, so there can be 1 to {self.layers} + 1 = {self.layers + 1} of them."
            )
        if self.fragments > self.period:
            raise UserError(
                f"sync.fragments is {self.fragments} and sync.period is {self.period}: at most one fragment is sent a "
                f"step, so there can be at most {self.period} fragments."
            )
        if self.pattern not in PATTERNS:
            raise UserError(f"sync.pattern is {self.pattern!r}; valid choices: {', '.join(PATTERNS)}.")

    def offset(self, fragment: int) -> int:
        """Return the remainder modulo H of the steps of a fragment's sends: floor(index in send order * H / P)."""
        place = self.fragments - 1 if fragment == 0 else fragment - 1
        return place * self.period // self.fragments

    def sent(self, step: int) -> int | None:
        """Return the fragment that is sent after `step` steps, if any."""
        if step <= 0:
            return None
        due = (fragment for fragment in range(self.fragments) if step % self.period == self.offset(fragment))
        return next(due, None)

    def applied(self, step: int) -> int | None:
        """Return the fragment that is applied after `step` steps, if any: it was sent `delay` steps before."""
        return self.sent(step - self.delay)

    def fragments_at(self, step: int) -> StepFragments:
        """Return the fragments of step number `step` (from 1): with tau >= 1 it sends the previous step's."""
        if self.delay == 0:
            return StepFragments(self.sent(step), self.sent(step))
        return StepFragments(self.sent(step - 1), self.applied(step))

    def sends(self, fragment: int, step: int) -> int:
        offset = self.offset(fragment)
        return (step - offset) // self.period + (offset > 0) if step >= offset else 0

    def outer_steps(self, first: int, last: int) -> int:
        """Return a fragment's most outer steps after step `first`, with the synchronisation of all after `last`."""
        due, fragments = self.sent(last), range(self.fragments)
        return max(self.sends(each, last) - self.sends(each, first) + (each != due) for each in fragments)

    def last_sent(self, step: int) -> int:
        """Return the last of the first `step` steps after which a fragment was sent; 0 if there was none."""
        return next((s for s in range(step, max(0, step - self.period), -1) if self.sent(s) is not None), 0)

    def rounds(self, steps: int) -> int:
        """Return the number of sends in the first `steps` steps: rounds 0, 1, 2, ... of islands."""
        return sum(self.sends(fragment, steps) for fragment in range(self.fragments))

    def round_step(self, number: int) -> int:
        """Return the number of steps after which round `number` is due; 0 for the round before the first."""
        periods, place = divmod(number + 1, self.fragments)
        return periods * self.period + place * self.period // self.fragments

    def round_fragment(self, number: int) -> int:
        place = (number + 1) % self.fragments
        return 0 if place == self.fragments - 1 else place + 1

    def layers_of(self, fragment: int) -> np.ndarray:
        """Return the layers of a fragment that has some, int32, ascending; sizes differ by at most one."""
        first = 0 if self.only_layers else 1
        groups, place = self.fragments - first, fragment - first
        if self.pattern == "strided":
            return np.arange(place, self.layers, groups, dtype=np.int32)
        return np.array_split(np.arange(self.layers, dtype=np.int32), groups)[place]

    def rows_of(self, fragment: int) -> dict[str, np.ndarray] | None:
        """Return, for the axis of each stack, the rows of a fragment in it, int32; no stack without a row.

        None: the fragment has what is outside of layers, or all arrays.
        """
        if self.fragments == 1 or (fragment == 0 and not self.only_layers):
            return None
        layers = self.layers_of(fragment)
        if not self.order:
            return {LAYERS: layers}
        rows = {axis: np.flatnonzero(np.isin(own, layers)) for axis, own in layer_numbers(self.order).items()}
        return {axis: own.astype(np.int32) for axis, own in rows.items() if own.size}
