"""Provides the programs of a run, compiled from shapes alone, with their audits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import haliax as hax
import jax

from gregale.audit import Audit, Collective, audit
from gregale.audit.device_axes import BETWEEN, INSIDE
from gregale.audit.step import Backend
from gregale.audit.traffic import Transfer
from gregale.programs.plan.compiling import Outcome
from gregale.programs.plan.devices import Target
from gregale.programs.plan.shapes import FAR_AXES, abstract_batch, step_shape, step_transfers
from gregale.programs.runtime.setup import Setup
from gregale.training.state import abstract_state

STEP, WARM_UP = "step", "warm_up"


@dataclass(frozen=True)
class Program(Outcome):
    """A compiled program with its audit.

    - `expected`: its transfers in closed form
    """

    audit: Audit
    expected: list[Transfer]


@dataclass(frozen=True)
class Lowering:
    """A program to compile.

    - `lower`: traces the program from shapes alone
    - `expected`: its transfers in closed form
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    expected: list[Transfer]


Compile = Callable[[Lowering], Outcome]


def programs_of(setup: Setup, target: Target, compile_: Compile) -> dict[str, Program]:
    """Return the compiled programs of `train` by name, without allocation.

    - `step`: the step of PSDP, or of DiLoCo's replicas without SEND or APPLY
    - the method's other programs, by the names of its traffic's `kinds`
    - `warm_up`: the PSDP step before another method begins
    """
    with hax.axis_mapping({}):
        return {
            each.name: _read(setup, target, compile_(each), each.expected) for each in lowerings(setup, target.backend)
        }


def lowerings(setup: Setup, backend: Backend) -> Iterator[Lowering]:
    """Yield the programs that `programs_of` compiles."""
    method, batch = setup.method, abstract_batch(setup)
    state, stepper = setup.abstract_state(), setup.stepper()
    sent, step = step_transfers(setup, backend), stepper.program.lower
    yield Lowering(STEP, partial(step, state, batch, *method.actions(1).during), sent)
    for name, kind in method.traffic(step_shape(setup)).kinds().items():
        actions = method.actions(kind.step)
        if actions.after is not None:
            yield Lowering(name, partial(stepper.synchronise.lower, state, actions.after), kind.transfers)
        else:
            yield Lowering(name, partial(step, state, batch, *actions.during), sent + kind.transfers)
    if setup.method_after(0) is not method:
        program, start = setup.stepper(setup.psdp).program, abstract_state(setup.psdp, setup.model)
        yield Lowering(WARM_UP, partial(program.lower, start, batch), step_transfers(setup, backend, setup.psdp))


def _read(setup: Setup, target: Target, outcome: Outcome, expected: list[Transfer]) -> Program:
    found = audit(outcome.text, setup.layout.mesh, known_trips(setup))
    if target.simulated:
        found = Audit(tuple(_with_link(collective) for collective in found.collectives))
    return Program(**vars(outcome), audit=found, expected=expected)


def known_trips(setup: Setup) -> dict[str, int]:
    """Return the trip counts, by scope, of loops whose counts a compiled program may lack."""
    return {"microbatches": setup.config.batch.microbatches}


def _with_link(collective: Collective) -> Collective:
    """Return the collective with a link; simulated devices have no slices, so `replica` counts as the slow link."""
    return replace(collective, link=BETWEEN if set(collective.touched) & set(FAR_AXES) else INSIDE)
