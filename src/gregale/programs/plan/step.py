"""Provides the plan of a run: the programs of `train`, compiled from shapes alone, and their joint estimates."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import haliax as hax
import jax

from gregale.audit import Audit, audit
from gregale.audit.collectives import BETWEEN, INSIDE, Collective, grid_of
from gregale.audit.estimate import Backend, CompilerMemory
from gregale.audit.overlap import HOST, Rates, Schedule, schedule_of
from gregale.audit.pallas_cost import Kernels
from gregale.audit.roofline import Roofline, link_rates, roofline
from gregale.audit.traffic import Transfer
from gregale.axes.layout import make_mesh
from gregale.axes.parameters import FURTHER_ROUNDS
from gregale.methods.traffic import SYNCHRONISE
from gregale.model.loss import AGAIN
from gregale.programs.plan.compiling import WITHOUT_OPTIMISED_CODE, Outcome, compiled_for
from gregale.programs.plan.devices import Target, for_accelerators
from gregale.programs.plan.memory_only_compile import Request, reported
from gregale.programs.plan.shapes import (
    FAR_AXES,
    abstract_batch,
    estimated_link_bytes,
    estimated_work,
    parameter_shape,
    step_transfers,
    tree_bytes,
)
from gregale.programs.plan.step_seconds import joined, link_grid
from gregale.programs.runtime.expert_parallelism import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.rules import check
from gregale.settings.rules import TRAINING
from gregale.training.state import abstract_state

STEP, WARM_UP = "step", "warm_up"
FIRST_STEPS = 10_000
CODE, MEMORY = "code", "memory"
UNTIL = (CODE, MEMORY)  # full compilation; compilation to the schedule and the memory report, which is faster


@dataclass(frozen=True)
class Program(Outcome):
    """A compiled program with its audit."""

    audit: Audit
    expected: list[Transfer]  # its transfers in closed form
    share: float = 1  # of the steps, that run it


@dataclass(frozen=True)
class Lowering:
    """A program to compile."""

    name: str
    lower: Callable[[], jax.stages.Lowered]  # traces the program from shapes alone
    expected: list[Transfer]  # its transfers in closed form
    share: float = 0  # of the steps, that run it; 0 if the closed form of the traffic tells


Compile = Callable[[Lowering], Outcome]


def programs_of(setup: Setup, target: Target, compile_: Compile) -> dict[str, Program]:
    """Return the compiled programs of `train` by name, without allocation.

    - `step`: the step of PSDP, or of DiLoCo's replicas without SEND or APPLY
    - the method's other programs, by the names of its traffic's `kinds`; without a closed form of the traffic those of
      the first steps, such as `step_30`, by the first step that runs the program
    - `warm_up`: the PSDP step before another method begins
    """
    with hax.axis_mapping({}):
        return {each.name: _read(setup, target, compile_(each), each) for each in lowerings(setup, target.backend)}


def lowerings(setup: Setup, backend: Backend) -> Iterator[Lowering]:
    method, batch = setup.method, abstract_batch(setup)
    state, stepper = setup.abstract_state(), setup.stepper()
    sent, step = step_transfers(setup, backend), partial(stepper.program.lower, state, batch)
    synchronise = partial(stepper.synchronise.lower, state)
    traffic = method.traffic(parameter_shape(setup))
    if traffic is None:
        first = [method.actions(number) for number in range(1, min(setup.config.steps, FIRST_STEPS) + 1)]
        for name, during, share in _kinds(STEP, [each.during for each in first]):
            yield Lowering(name, partial(step, *during), sent, share)
        for name, after, share in _kinds(SYNCHRONISE, [each.after for each in first]):
            if after is not None:
                yield Lowering(name, partial(synchronise, after), [], share)
    else:
        yield Lowering(STEP, partial(step, *method.actions(1).during), sent, 1)
        for name, kind in traffic.kinds().items():
            actions = method.actions(kind.step)
            if actions.after is not None:
                yield Lowering(name, partial(synchronise, actions.after), kind.transfers)
            else:
                yield Lowering(name, partial(step, *actions.during), sent + kind.transfers)
    if setup.method_after(0) is not method:
        program, start = setup.stepper(setup.psdp).program, abstract_state(setup.psdp, setup.model)
        yield Lowering(WARM_UP, partial(program.lower, start, batch), step_transfers(setup, backend, setup.psdp))


def _kinds(name: str, given: list[Any]) -> list[tuple[str, Any, float]]:
    """Return the kinds of arguments in the first steps: a program's name, arguments, and their share of the steps.

    Arguments of equal structure, shapes and dtypes have one program.
    """
    found: dict[Any, list[int]] = {}
    for index, arguments in enumerate(given):
        leaves, structure = jax.tree.flatten(arguments)
        found.setdefault((structure, *map(jax.typeof, leaves)), []).append(index)
    first = [(indices[0], len(indices) / len(given)) for indices in found.values()]
    return [(f"{name}_{index + 1}" if index else name, given[index], share) for index, share in first]


def _read(setup: Setup, target: Target, outcome: Outcome, lowering: Lowering) -> Program:
    found = audit(outcome.text, setup.layout.mesh, known_trips(setup))
    if target.simulated:
        # Simulated devices have no slices, so `replica` counts as the slow link.
        far = [BETWEEN if set(each.touched) & set(FAR_AXES) else INSIDE for each in found.collectives]
        pairs = zip(found.collectives, far, strict=True)
        found = Audit(tuple(replace(collective, link=link) for collective, link in pairs))
    return Program(**vars(outcome), audit=found, expected=lowering.expected, share=lowering.share)


def known_trips(setup: Setup) -> dict[str, int]:
    """Return the trip counts, by scope, of loops whose counts a compiled program may lack."""
    return {"microbatches": setup.config.batch.microbatches, AGAIN: 0, FURTHER_ROUNDS: 0}


@dataclass(frozen=True)
class Plan:
    """The compiled programs of a run."""

    setup: Setup
    target: Target
    programs: dict[str, Program]  # programs by name, see `programs_of`; always includes `step`
    until: str = CODE  # last compiler stage, one of `UNTIL`

    @property
    def step(self) -> Program:
        return self.programs[STEP]

    @property
    def largest(self) -> str:
        return max(self.programs, key=lambda name: self.programs[name].memory.peak)

    @property
    def memory(self) -> CompilerMemory:
        return self.programs[self.largest].memory

    @property
    def memory_bytes(self) -> int:
        """Return a device's bytes for programs: from the compiler's error if one does not fit, else from the chip."""
        offered = [each.shortage.offered for each in self.programs.values() if each.shortage is not None]
        return min([*offered, self.target.memory_bytes])

    @property
    def link_bytes(self) -> dict[str, float]:
        """Return the bytes that a device sends over each link in a step, for DiLoCo on average.

        They are from the compiled step. For simulated devices, because XLA:CPU sends bfloat16 as float32, and for
        methods whose steps differ, they are from the closed form if there is one, else the average of the first steps.
        """
        if self.target.simulated or len(self.programs) > 1:
            estimated = estimated_link_bytes(self.setup)
            if estimated is not None:
                return estimated
        sent = {INSIDE: 0.0, BETWEEN: 0.0}
        for program in self.programs.values():
            for collective in program.audit.collectives:
                sent[collective.link] += program.share * collective.bytes_sent * collective.counted
        return sent

    def schedule(self, program: Program, between_bytes_per_second: float | None) -> Schedule | None:
        """Return the timed run of a program by the compiler's cycle estimates; None without those of its whole code."""
        target, cycles = self.target, self.target.chip.cycles_per_second
        without_code = self.until == MEMORY or program.shortage is not None
        if target.simulated or cycles is None or without_code:
            return None
        kernels = Kernels(target.chip, target.devices_a_chip)
        links = link_rates(target.chip, target.devices_a_chip, between_bytes_per_second)
        links[HOST] = target.chip.host_bytes_per_second / target.devices_a_chip
        rates = Rates(cycles, links, kernels, grid_of(self.setup.layout.mesh, target.chip, target.devices_a_chip))
        return schedule_of(program.text, program.audit.collectives, rates, known_trips(self.setup))

    def roofline(self, between_bytes_per_second: float | None) -> Roofline:
        """Return the bounds of a step's time. Raises `UserError` for a model without closed forms."""
        work = estimated_work(self.setup, self.link_bytes)
        return roofline(work, self.target.chip, self.target.devices_a_chip, between_bytes_per_second)


def plan_step(config: TrainConfig, tokens: int, target: Target, until: str = CODE) -> Plan:
    """Compile the programs of a configuration for the target and return the plan.

    - `until`: last compiler stage, one of `UNTIL`

    Raises `UserError` if the configuration does not fit the devices.
    """
    setup = setup_for(config, tokens, target)
    return Plan(setup, target, programs_of(setup, target, _compiler(setup, tokens, target, until)), until)


def setup_for(config: TrainConfig, tokens: int, target: Target) -> Setup:
    """Return the setup of a configuration for the target. Raises `UserError` as `plan_step`."""
    config = for_accelerators(config, target)
    setup = set_up(config, tokens, make_mesh(config.mesh, target.devices))
    check(config, setup.layout, TRAINING)
    return setup


def _compiler(setup: Setup, tokens: int, target: Target, until: str) -> Compile:
    arguments = tree_bytes(setup).arguments
    if until == MEMORY and target.topology is not None:
        request = Request(setup.config, tokens, *target.topology)
        return lambda each: reported(request, each.name, arguments)
    options = WITHOUT_OPTIMISED_CODE if until == MEMORY and target.simulated else None
    return lambda each: compiled_for(target, each.name, each.lower(), arguments, options)


def scheduled_seconds(plan: Plan, bandwidth: float | None) -> float:
    """Return a step's time by its schedule: asynchronous transfers inside a slice hide behind other work.

    Synchronous transfers, and those between slices, which little work could hide, add their full time.
    """
    bound, target = plan.roofline(bandwidth), plan.target
    rate, grid = link_rates(target.chip, target.devices_a_chip, bandwidth)[INSIDE], link_grid(plan.setup, target)

    def total(some: Iterable[Collective]) -> float:
        return sum(each.counted * ((grid and grid.seconds(each)) or each.bytes_sent / rate) for each in some)

    inside = [each for each in plan.step.audit.collectives if each.link == INSIDE]
    sent, hidden = total(inside), total(each for each in inside if each.is_async)
    if grid is None and sent:  # XLA:CPU sends bfloat16 as float32, which the closed form does not
        sent, hidden = bound.links[INSIDE], bound.links[INSIDE] * hidden / sent
    return joined(bound, max(hidden, bound.host), sent - hidden)
