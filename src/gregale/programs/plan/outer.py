"""What joining DiLoCo's replicas sends, in closed form: by step, and on average over a period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax

from gregale.audit.step import StepShape
from gregale.audit.traffic import (
    Transfer,
    agreement,
    apply_transfers,
    given_back,
    kept,
    reduced,
    send_transfers,
    sent_bytes,
)
from gregale.axes.layout import is_named
from gregale.communication.quantised import QuantisedReducer
from gregale.methods.diloco import Diloco
from gregale.methods.fragments import Fragment
from gregale.programs.plan.messages import give_back_messages, measure_messages, send_messages


class Legs(NamedTuple):
    """The numbers of the fragments that a step sends and applies; None for none."""

    send: int | None
    apply: int | None


@dataclass(frozen=True)
class Joining:
    """How a DiLoCo method joins the replicas of a model.

    - `method`: the method
    - `step`: the model's sizes
    """

    method: Diloco
    step: StepShape

    def legs(self, step: int) -> Legs:
        """What step number `step` (from 1) sends and applies, whether in its own program or after it."""
        actions = self.method.actions(step)
        send, apply = actions.during if actions.after is None else (actions.after, actions.after)
        return Legs(*(None if fragment is None else int(fragment.index) for fragment in (send, apply)))

    def period(self) -> Iterator[tuple[int, Legs]]:
        """The steps of a period, each with its legs; not of the first one, in which not everything has begun."""
        length = self.method.schedule.period
        return ((step, self.legs(step)) for step in range(2 * length, 3 * length))

    def transfers(self, legs: Legs) -> list[Transfer]:
        """Everything that the legs send, as the audit finds it in the compiled program."""
        send = [] if legs.send is None else self._send(self.part(legs.send))
        return send if legs.apply is None else send + self._apply(self.part(legs.apply))

    def bytes_over_axis(self, legs: Legs) -> float:
        """What a device sends over the slow axis for the parameters in these legs, as `Diloco.bytes_sent` counts it."""
        reducer, axis = self.method.joint.reducer, self.method.axis
        send, apply = (None if leg is None else self.part(leg) for leg in legs)
        if isinstance(reducer, QuantisedReducer):
            found = [] if send is None else send_messages(reducer, send.weights)
            found += [] if apply is None else give_back_messages(reducer, apply.weights)
        else:
            found = [] if send is None else reduced(send, axis)
            found += [] if apply is None else given_back(apply)
        return self._sent(each for each in found if each.axes == (axis,))

    def bytes_a_step(self) -> tuple[float, float]:
        """What a device sends over the slow axis for the parameters: average of a period, and largest step."""
        sent = [self.bytes_over_axis(legs) for _, legs in self.period()]
        return sum(sent) / len(sent), max(sent)

    def bytes_if_every_step(self) -> float:
        """What a device would send over the slow axis to reduce and give back everything: what PSDP does each step."""
        whole = replace(self.step, layout=self.method.outer_layout)
        transfers = [*reduced(whole, self.method.axis), *given_back(whole)]
        return self._sent(each for each in transfers if each.axes == (self.method.axis,))

    def _send(self, part: StepShape) -> list[Transfer]:
        reducer, axis = self.method.joint.reducer, self.method.axis
        if not isinstance(reducer, QuantisedReducer):
            return send_transfers(part, axis)
        messages = [*send_messages(reducer, part.weights), *measure_messages(reducer, 1)]
        return kept(part, [*messages, *agreement(part, axis)])

    def _apply(self, part: StepShape) -> list[Transfer]:
        reducer = self.method.joint.reducer
        if not isinstance(reducer, QuantisedReducer):
            return apply_transfers(part)
        # With islands, the replicas inside one put their parts together, in float32.
        inside = replace(part, layout=replace(part.layout, opt_state=reducer.layout.params))
        return kept(part, [*give_back_messages(reducer, part.weights), *given_back(inside)])

    def part(self, fragment: int) -> StepShape:
        """The sizes of a fragment, where the outer parameters live."""
        layers = self.method.schedule.layers_of(fragment) if fragment else ()
        return self._parts[fragment == 0, len(layers)]

    @cached_property
    def _parts(self) -> dict[tuple[bool, int], StepShape]:
        """Fragments of as many layers have the same sizes."""
        schedule, found = self.method.schedule, {}
        for index in range(schedule.fragments):
            fragment = Fragment.at(schedule, index, 0)
            assert fragment is not None
            key = index == 0, 0 if fragment.layers is None else len(fragment.layers)
            if key not in found:
                part = jax.eval_shape(fragment.take, list(self.step.weights))
                weights = [leaf for leaf in jax.tree.leaves(part, is_leaf=is_named) if is_named(leaf)]
                found[key] = replace(self.step, layout=self.method.outer_layout, weights=weights)
        return found

    def _sent(self, transfers: Iterable[Transfer]) -> float:
        return sum(sent_bytes(transfer, self.step.mesh) for transfer in transfers)
