"""The schedule of synchronisation: fragments of the parameters, the steps that send and apply them, their traffic."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import LAYERS, Tree, is_named
from gregale.axes.parameters import layer_numbers, layers_axis
from gregale.communication.quantised import ErrorState, Reducer
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
        """Return the number of sends in the first `steps` steps: rounds 0, 1, 2, ..."""
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


FRAGMENT = "fragment"


class Fragment(eqx.Module):
    """A part of a tree: an argument of compiled programs, so that fragments of equal size share a program.

    - `index`: int32 scalar, the fragment's number
    - `sent`: int32 scalar, the number of steps after which it was sent
    - `rows`: by the axis of each stack of layers, int32 [layers of the fragment in it]; None for the fragment of all
      arrays without such an axis
    - `whole`: whether it is the whole tree (P = 1)
    """

    index: Any
    sent: Any
    rows: Any
    whole: bool = eqx.field(static=True)

    @staticmethod
    def at(schedule: Schedule, index: int | None, sent: int) -> "Fragment | None":
        if index is None:
            return None
        return Fragment(np.int32(index), np.int32(sent), schedule.rows_of(index), whole=schedule.fragments == 1)

    def take(self, tree: Tree) -> Tree:
        """Return the fragment's part of a tree, None elsewhere.

        It has the fragment's layers of stacked arrays, and the fragment's own entry of arrays with an
        axis `fragment`. Other arrays are whole if they belong to the fragment.
        """
        return jax.tree.map(self._take, tree, is_leaf=is_named)

    def put(self, tree: Tree, part: Tree) -> Tree:
        """Return the tree with the fragment's part replaced; nothing else changes by a bit."""
        return jax.tree.map(self._put, tree, part, is_leaf=is_named)

    def _take(self, leaf):
        if _has(leaf, FRAGMENT):
            return leaf.rearrange((FRAGMENT, ...)).array[self.index]
        axis = layers_axis(leaf)
        if self.whole or (self.rows is None and axis is None):
            return leaf
        if self.rows is None or axis not in self.rows:
            return None
        return NamedArray(jnp.take(leaf.array, self.rows[axis], axis=leaf.axis_names.index(axis)), leaf.axis_names)

    def _put(self, leaf, new):
        if new is None:
            return leaf
        if _has(leaf, FRAGMENT):
            leaf = leaf.rearrange((FRAGMENT, ...))
            return NamedArray(leaf.array.at[self.index].set(new), leaf.axis_names)
        if self.rows is None:
            return new
        axis = layers_axis(leaf)
        place = (slice(None),) * leaf.axis_names.index(axis) + (self.rows[axis],)
        return NamedArray(leaf.array.at[place].set(new.array), leaf.axis_names)


class Alike(NamedTuple):
    """The kinds of a schedule's fragments: fragments of equal size share a compiled branch."""

    kind: np.ndarray  # int32 [fragment]
    rows: list[dict[str, np.ndarray] | None]  # by kind and axis: int32 [fragment, rows], other fragments' unused


def fragments_alike(schedule: Schedule) -> Alike:
    """Group a schedule's fragments by their numbers of rows; the one without layers is kind 0."""
    kind, rows = np.zeros(schedule.fragments, np.int32), []
    every = {number: schedule.rows_of(number) for number in range(schedule.fragments)}
    of_each = {number: own for number, own in every.items() if own is not None}
    without: list[dict[str, np.ndarray] | None] = [None] if len(of_each) < len(every) else []
    for sizes in sorted({sizes_of(own) for own in of_each.values()}):
        rows.append({axis: np.zeros((schedule.fragments, count), np.int32) for axis, count in sizes})
        for number in (number for number, own in of_each.items() if sizes_of(own) == sizes):
            kind[number] = len(without) + len(rows) - 1
            for axis, own in of_each[number].items():
                rows[-1][axis][number] = own
    return Alike(kind, [*without, *rows])


def sizes_of(rows: Mapping[str, np.ndarray]) -> tuple[tuple[str, int], ...]:
    """Return the number of a fragment's rows in each stack."""
    return tuple((axis, len(own)) for axis, own in rows.items())


def _has(leaf, name: str) -> bool:
    return isinstance(leaf, NamedArray) and name in leaf.axis_names


def per_fragment(optimizer: optax.GradientTransformation, state: Tree, fragments: int) -> Tree:
    """Return an optimizer's state whose leaves unlike the parameters (its counters) have an axis of fragments."""

    def counter(leaf):
        names = (FRAGMENT, *(f"{FRAGMENT}_{dimension}" for dimension in range(leaf.ndim)))
        return NamedArray(jnp.broadcast_to(leaf, (fragments, *leaf.shape)), names)

    return optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: leaf, state, transform_non_params=counter, is_leaf=is_named
    )


def errors_per_fragment(error: ErrorState | None, fragments: int) -> ErrorState | None:
    """Return the errors of quantised averages with one counter for each fragment; None stays None."""
    if error is None:
        return None
    return error._replace(steps=hax.zeros(hax.Axis(FRAGMENT, fragments), jnp.int32))


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
