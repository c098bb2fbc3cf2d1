"""The traffic of methods in closed form: by step, and on average over a period."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax

from gregale.axes.layout import Layout, Tree, named_arrays
from gregale.axes.parameters import trainable
from gregale.communication.quantised import Reducer
from gregale.cost.estimate import ParameterShape
from gregale.cost.traffic import (
    Transfer,
    agreement,
    apply_transfers,
    gathers,
    kept,
    reduced,
    send_transfers,
    sent_bytes,
)
from gregale.methods.schedule import Fragment, Schedule, StepFragments, sizes_of

SYNCHRONISE = "synchronise"
STEP_KINDS = {(True, False): "send", (False, True): "apply", (True, True): "send_and_apply"}


class StepKind(NamedTuple):
    """A kind of steps with actions beside their update, described by one of them."""

    step: int  # the number of the step of this kind that sends most
    transfers: list[Transfer]  # of its phases, in closed form


@dataclass(frozen=True)
class PsdpTraffic:
    """The traffic of PSDP, the same in every step."""

    reducer: Reducer  # over `replica`
    model: Tree  # its parameters are averaged
    step: ParameterShape  # the model's sizes

    period = 1  # steps after which the transfers repeat

    @property
    def averages(self) -> list[Transfer] | None:
        """Return each step's transfers to average gradients, take their norm and gather updates; None: float32."""
        reducer = self.reducer
        if reducer.quantised is False:
            return None
        sent, gathered = reducer.reduce_transfers(self.model), reducer.gather_transfers(self.model)
        return [*sent, *reducer.measure_transfers(2), *gathered]

    def kinds(self) -> dict[str, StepKind]:
        """Return, by the name of its program, each kind of steps with actions beside their update: none."""
        return {}

    def joins(self) -> list[Transfer]:
        """Return all transfers of a period's steps beside their updates: none."""
        return []

    def bytes_a_step(self) -> tuple[float, float]:
        """Return a device's bytes over the slow axis for the parameters: average and maximum of a step."""
        sent = float(self.reducer.bytes_sent(trainable(self.model)))
        return sent, sent


@dataclass(frozen=True)
class DilocoTraffic:
    """The traffic of DiLoCo between its replicas; their own steps are exact, with a replica's own traffic."""

    schedule: Schedule  # the steps at which fragments are sent and applied
    reducer: Reducer  # over the axis of the replicas
    layout: Layout  # of the outer parameters
    step: ParameterShape  # the model's sizes

    averages = None

    @property
    def period(self) -> int:
        return self.schedule.period

    def steps(self) -> Iterator[tuple[int, StepFragments]]:
        """Yield the steps of a period with their fragments; not the first period, which is incomplete."""
        return ((step, self.schedule.fragments_at(step)) for step in range(2 * self.period, 3 * self.period))

    def kinds(self) -> dict[str, StepKind]:
        """Return `synchronise`: SEND and APPLY after a step (tau = 0); `send`, `apply`, `send_and_apply`: in a step.

        If fragments differ in size, the step is the one that sends most of its kind.
        """
        found: dict[str, tuple[int, StepFragments]] = {}
        for number, due in self.steps():
            if due == StepFragments(None, None):
                continue
            both = due.send is not None, due.apply is not None
            name = SYNCHRONISE if self.schedule.delay == 0 else STEP_KINDS[both]
            if name not in found or self.bytes_over_axis(due) > self.bytes_over_axis(found[name][1]):
                found[name] = number, due
        return {name: StepKind(number, self.transfers(due)) for name, (number, due) in found.items()}

    def joins(self) -> list[Transfer]:
        return [transfer for _, due in self.steps() for transfer in self.transfers(due)]

    def transfers(self, due: StepFragments) -> list[Transfer]:
        """Return all transfers of these fragments, as the audit finds them in the compiled program."""
        send = [] if due.send is None else self._send(self.part(due.send))
        return send if due.apply is None else send + self._apply(self.part(due.apply))

    def bytes_over_axis(self, due: StepFragments) -> float:
        """Return a device's bytes over the slow axis for these fragments, as `Diloco.bytes_sent`."""
        send, apply = (None if each is None else self.part(each) for each in due)
        return self._over_axis(send, apply)

    def bytes_a_step(self) -> tuple[float, float]:
        """Return a device's bytes over the slow axis for the parameters: average and maximum of a step."""
        sent = [self.bytes_over_axis(due) for _, due in self.steps()]
        return sum(sent) / len(sent), max(sent)

    def bytes_if_every_step(self) -> float:
        """Return a device's bytes over the slow axis to reduce and gather everything, as PSDP does."""
        whole = replace(self.step, layout=self.layout)
        return self._over_axis(whole, whole)

    def _over_axis(self, send: ParameterShape | None, apply: ParameterShape | None) -> float:
        reducer, axis = self.reducer, self.reducer.axis
        if reducer.quantised is True:
            found = [] if send is None else reducer.reduce_transfers(send.weights)
            found += [] if apply is None else reducer.gather_transfers(apply.weights)
        else:
            found = [] if send is None else reduced(send, axis)
            found += [] if apply is None else gathers(apply)
        return sum(sent_bytes(each, self.step.mesh) for each in found if each.axes == (axis,))

    def _send(self, part: ParameterShape) -> list[Transfer]:
        reducer, axis = self.reducer, self.reducer.axis
        if reducer.quantised is False:
            return send_transfers(part, axis)
        messages = [*reducer.reduce_transfers(part.weights), *reducer.measure_transfers(1)]
        return kept(part, [*messages, *agreement(part, axis)])

    def _apply(self, part: ParameterShape) -> list[Transfer]:
        reducer = self.reducer
        if reducer.quantised is False:
            return apply_transfers(part)
        # Over `island`, the replicas inside gather their parts, in float32.
        inside = replace(part, layout=replace(part.layout, opt_state=reducer.layout.params))
        return kept(part, [*reducer.gather_transfers(part.weights), *gathers(inside)])

    def part(self, fragment: int) -> ParameterShape:
        """Return the sizes of a fragment under the layout of the outer parameters."""
        return self._parts[sizes_of(self.schedule.rows_of(fragment) or {})]

    @cached_property
    def _parts(self) -> dict[tuple, ParameterShape]:
        """Return a cache of sizes: fragments with equal numbers of rows have the same sizes."""
        schedule, found = self.schedule, {}
        for index in range(schedule.fragments):
            fragment = Fragment.at(schedule, index, 0)
            assert fragment is not None
            key = sizes_of(fragment.rows or {})
            if key not in found:
                part = jax.eval_shape(fragment.take, list(self.step.weights))
                weights = named_arrays(part)
                found[key] = replace(self.step, layout=self.layout, weights=weights)
        return found
