"""The programs of a run, compiled from shapes alone, and what is read off them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import haliax as hax
import jax

from gregale.audit import Audit, Collective, audit
from gregale.audit.memory import CompilerMemory, compiler_memory
from gregale.audit.overlap import compute_behind
from gregale.audit.placement import BETWEEN, INSIDE
from gregale.audit.traffic import Transfer
from gregale.methods.diloco import Diloco
from gregale.programs.plan.devices import Target
from gregale.programs.plan.outer import Joining, Legs
from gregale.programs.plan.shapes import FAR_AXES, abstract_batch, step_shape, step_transfers
from gregale.programs.run.setup import Setup
from gregale.training.state import abstract_state

STEP, SYNCHRONISE, WARM_UP = "step", "synchronise", "warm_up"
WITH_LEGS = {(True, False): "send", (False, True): "apply", (True, True): "send_and_apply"}


@dataclass(frozen=True)
class Program:
    """What a compiled program tells.

    - `text`: as the compiler prints it
    - `expected`: what it has to send, in closed form
    - `behind`: computing instructions between start and end of each collective, by its name
    """

    text: str
    audit: Audit
    expected: list[Transfer]
    memory: CompilerMemory
    flops: float
    behind: dict[str, int]

    def hidden(self, collective: Collective) -> bool:
        """Whether compute runs while the collective is on its way."""
        return self.behind.get(collective.name, 0) > 0


def programs_of(setup: Setup, target: Target) -> dict[str, Program]:
    """The programs that `train` runs, compiled by name; nothing is allocated.

    - `step`: of PSDP, or of DiLoCo's replicas when nothing is sent or applied
    - `synchronise`: SEND and APPLY of a fragment after a step (tau = 0)
    - `send`, `apply`, `send_and_apply`: a step in which a fragment is sent, applied, or one of each (tau >= 1)
    - `warm_up`: the PSDP step before DiLoCo begins

    Where fragments differ in size, the program is the one that sends most of its kind.
    """
    with hax.axis_mapping({}):
        return {name: _read(setup, target, lowered.compile(), sent) for name, lowered, sent in _lowered(setup, target)}


def _lowered(setup: Setup, target: Target) -> Iterator[tuple[str, jax.stages.Lowered, list[Transfer]]]:
    """The name, the program to compile, and what it has to send."""
    method, batch = setup.method, abstract_batch(setup)
    state, stepper = setup.abstract_state(), setup.stepper()
    sent = step_transfers(setup, target.backend)
    yield STEP, stepper.program.lower(state, batch, *method.actions(1).during), sent
    if not isinstance(method, Diloco):
        return
    joining = Joining(method, step_shape(setup))
    for name, (number, legs) in _largest_of_each_kind(joining).items():
        actions = method.actions(number)
        if actions.after is not None:
            yield name, stepper.synchronise.lower(state, actions.after), joining.transfers(legs)
        else:
            yield name, stepper.program.lower(state, batch, *actions.during), sent + joining.transfers(legs)
    if setup.method_after(0) is not method:
        program, start = setup.stepper(setup.psdp).program, abstract_state(setup.psdp, setup.model)
        yield WARM_UP, program.lower(start, batch), step_transfers(setup, target.backend, setup.psdp)


def _largest_of_each_kind(joining: Joining) -> dict[str, tuple[int, Legs]]:
    """By name the step, and its legs, that send most of their kind in a period."""
    found: dict[str, tuple[int, Legs]] = {}
    for number, legs in joining.period():
        if legs == Legs(None, None):
            continue
        both = legs.send is not None, legs.apply is not None
        name = SYNCHRONISE if joining.method.schedule.delay == 0 else WITH_LEGS[both]
        if name not in found or joining.bytes_over_axis(legs) > joining.bytes_over_axis(found[name][1]):
            found[name] = number, legs
    return found


def _read(setup: Setup, target: Target, compiled: jax.stages.Compiled, expected: list[Transfer]) -> Program:
    text = compiled.as_text() or ""
    found = audit(text, setup.layout.mesh, {"microbatches": setup.config.batch.microbatches})
    if target.simulated:
        found = Audit(tuple(_with_link(collective) for collective in found.collectives))
    costs = compiled.cost_analysis() or {}
    return Program(
        text=text,
        audit=found,
        expected=expected,
        memory=compiler_memory(compiled),
        flops=float(costs.get("flops", 0.0)),
        behind=compute_behind(text),
    )


def _with_link(collective: Collective) -> Collective:
    """Simulated devices have no slices: what crosses replicas is taken to cross the slow link."""
    return replace(collective, link=BETWEEN if set(collective.touched) & set(FAR_AXES) else INSIDE)
