"""The schedule of the circular pipeline: the work of each stage as arithmetic on iteration numbers."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gregale.errors import UserError, multiples_near


class Item(NamedTuple):
    """The work of a stage in one iteration: a microbatch in its `repeat`-th pass through the stages."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class Schedule:
    """A circular pipeline: each microbatch passes all stages `repeats` times.

    At iteration t stage s works on item n = t - F s, which is microbatch n mod M in repeat n div M, and idles if n is
    not one of the M R items. After M R + F (S - 1) iterations the last stage has finished the last item. Raises
    `UserError` for numbers that do not fit together.

    - `stages`: S, at least 2
    - `microbatches`: M, a multiple of S; at least F S, so that an item is back at stage 0 when its next repeat starts
    - `repeats`: R; stage s holds the layers of (0, s), (1, s), ... (R - 1, s)
    - `forwarding`: F, iterations from a stage's output to the next stage's use of it: 1, or 2 when forwarding is
      delayed so that the transfer runs beside the next iteration's compute
    """

    stages: int
    microbatches: int
    repeats: int = 1
    forwarding: int = 1

    def __post_init__(self):
        S, M, R, F = self.stages, self.microbatches, self.repeats, self.forwarding
        if S < 2:
            raise UserError(
                f"mesh.stage is {S}: a pipeline needs at least 2 stages. Set mesh.stage to 2 or more, or take "
                "`pipeline` out of the configuration."
            )
        if R < 1:
            raise UserError(f"pipeline.repeats is {R}: microbatches pass the stages at least once; use 1 or more.")
        if F not in (1, 2):
            raise UserError(f"forwarding is {F}: a stage's output is used 1 iteration later, or 2 if it is delayed.")
        if M < 1 or M % S:
            raise UserError(
                f"pipeline.microbatches is {M}, which is not a multiple of mesh.stage {S}: each stage keeps "
                f"{M} / {S} = {M / S:.4g} microbatches. pipeline.microbatches {multiples_near(M, S)} would work."
            )
        if M < F * S:
            raise UserError(
                f"pipeline.microbatches is {M} with delayed forwarding and mesh.stage {S}: an output takes {F} "
                f"iterations to the next stage, so {F} x {S} = {F * S} microbatches must be on their way. Set "
                f"pipeline.microbatches to {F * S} or more, or pipeline.delay_forwarding to false."
            )

    @property
    def items(self) -> int:
        """Return M R: the items of each stage."""
        return self.microbatches * self.repeats

    @property
    def drain(self) -> int:
        """Return F (S - 1): iterations until the last stage has finished after the first."""
        return self.forwarding * (self.stages - 1)

    @property
    def iterations(self) -> int:
        """Return T = M R + F (S - 1)."""
        return self.items + self.drain

    @property
    def bubble(self) -> float:
        """Return the fraction of the iterations in which a stage idles: F (S - 1) / T."""
        return self.drain / self.iterations

    @property
    def columns(self) -> int:
        """Return M / S: microbatches whose inputs, and later outputs, each stage keeps."""
        return self.microbatches // self.stages

    @property
    def waiting(self) -> int:
        """Return the iterations that the last stage's output waits at stage 0 for its next repeat: M - F S."""
        return self.microbatches - self.forwarding * self.stages if self.repeats > 1 else 0

    def item(self, stage: int, iteration: int) -> Item | None:
        n = iteration - self.forwarding * stage
        return Item(n % self.microbatches, n // self.microbatches) if 0 <= n < self.items else None

    @property
    def uses(self) -> np.ndarray:
        """Return whether a stage uses a repeat's weights in an iteration for one of its items: [iteration, repeat,
        stage].
        """
        n = self.item_numbers(np.arange(self.iterations)[:, None])
        used = (n >= 0) & (n < self.items)
        return used[:, None] & (n[:, None] // self.microbatches == np.arange(self.repeats)[:, None])

    def item_numbers(self, iteration):
        """Return n = t - F s of every stage, [stage]; `iteration` may be traced. Stages with n < 0 or n >= `items`
        idle.
        """
        return iteration - self.forwarding * np.arange(self.stages, dtype=np.int32)

    def microbatch_numbers(self, iteration):
        """Return the microbatch of every stage, [stage], in [0, M) for idle stages too."""
        return self.item_numbers(iteration) % self.microbatches

    def repeat_numbers(self, iteration):
        """Return the repeat of every stage, [stage], in [0, R) for idle stages too."""
        return (self.item_numbers(iteration) // self.microbatches).clip(0, self.repeats - 1)

    def uses_next(self, iteration):
        """Return which window slot every stage uses, [stage]: true for `w_next`, false for `w_now`.

        In the M iterations of repeat r the slot `w_next` holds the weights of repeat r, and `w_now` those of r - 1. A
        stage uses the repeat of its own item. A stage that has not begun takes `w_next`, since `w_now` is still empty.
        In the drain (iterations from M R on) no item is of the repeat R, and all stages take `w_now`.
        """
        n, repeat = self.item_numbers(iteration), iteration // self.microbatches
        return (n // self.microbatches == repeat) & (repeat < self.repeats) | (n < 0)

    def layers_per_stage(self, layers: int) -> int:
        """Return l = layers / (S R); raise `UserError` if that is not a whole number."""
        groups = self.stages * self.repeats
        if layers % groups or not layers:
            fitting = [str(r) for r in range(1, layers + 1) if layers % (self.stages * r) == 0]
            repeats = f", or pipeline.repeats {' or '.join(fitting)}" if fitting else ""
            raise UserError(
                f"model.layers is {layers}: mesh.stage {self.stages} x pipeline.repeats {self.repeats} = {groups} "
                f"groups of layers, and {layers} / {groups} = {layers / groups:.4g} is not a whole number of layers. "
                f"model.layers {multiples_near(layers, groups)} would work{repeats}."
            )
        return layers // groups

    def picture(self, max_iterations: int = 32) -> str:
        """Draw stage against iteration: each microbatch, with a letter for its repeat; `.` is a bubble.

        `3b` is microbatch 3 in its second repeat. Of a longer schedule the first and the last iterations are shown.
        """
        shown: list[int | None] = list(range(self.iterations))
        if self.iterations > max_iterations:
            half = max_iterations // 2
            shown = [*range(half), None, *range(self.iterations - half, self.iterations)]
        rows = [["iteration", *("..." if t is None else str(t) for t in shown)]]
        for stage in range(self.stages):
            cells = ["..." if t is None else _cell(self.item(stage, t)) for t in shown]
            rows.append([f"stage {stage}", *cells])
        first = max(len(row[0]) for row in rows)
        width = max(len(cell) for row in rows for cell in row[1:])
        return "\n".join(
            " ".join([row[0].ljust(first), *(cell.rjust(width) for cell in row[1:])]).rstrip() for row in rows
        )


def _cell(item: Item | None) -> str:
    if item is None:
        return "."
    letters = "abcdefghijklmnopqrstuvwxyz"
    return f"{item.microbatch}{letters[item.repeat] if item.repeat < len(letters) else f':{item.repeat}'}"
