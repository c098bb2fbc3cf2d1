"""The fastest way to compute a step that fits: remat policy x microbatches x unrolled layers x gather.

    found = search(config, tokens, target, Asked(link_gbit_per_second, count, tell))

All candidates are weighed by the closed forms of memory and time. Then the compiler is asked, from the fastest on, as
far as its memory report, until enough of them fit; of those the fastest by its schedule is the answer. Layers are
unrolled only then, for the closed forms do not know what that overlaps. Meshes, pipelines and attention are not
searched, and neither is what changes a result: the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from gregale.audit.device_axes import INSIDE
from gregale.errors import UserError
from gregale.model.execution import execution
from gregale.programs.plan.candidates import Candidate, ScoredCandidate, weighed_candidates
from gregale.programs.plan.devices import Target
from gregale.programs.plan.island import island_of
from gregale.programs.plan.remedies import Remedy, cost, remedies
from gregale.programs.plan.report import link_bytes_per_second, memory_of
from gregale.programs.plan.shapes import devices_of_a_replica
from gregale.programs.plan.step import MEMORY, Plan, plan_step, setup_for
from gregale.programs.plan.text import size
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig

ENOUGH = 3  # candidates that fit, by the compiler
MOST_COMPILED = 8
DOUBT = 1.25  # a closed form above so many times the memory is believed
UNROLLED = 2  # layers, tried of the best where the compiler shows what it overlaps


@dataclass(frozen=True)
class Found:
    """The result of a search.

    - `weighed`: all candidates, the fastest by the closed form first; unrolled ones last
    - `best`: the fastest that fits; None: none that was compiled does
    - `configured`: what the configuration has
    - `memory`: bytes of a device for programs
    - `left_out`: why candidates are not possible, each reason once
    - `remedies`: if nothing fits, what would take less than the smallest
    """

    weighed: list[ScoredCandidate]
    best: ScoredCandidate | None
    configured: Candidate
    memory: int
    left_out: list[str]
    remedies: list[Remedy]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "memory": self.memory,
            "fits": self.best is not None,
            "best": None if self.best is None else self.best.to_dict(),
            "yaml": None if self.best is None else self.best.candidate.yaml(),
            "configured": asdict(self.configured),
            "candidates": [each.to_dict() for each in self.weighed],
            "left_out": self.left_out,
            "remedies": [each.to_dict() for each in self.remedies],
        }


@dataclass(frozen=True)
class Asked:
    """What a search is told beside the configuration.

    - `link_gbit_per_second`: a replica's link to the others; None: its chips' share of the network
    - `count`: islands, if the run is one of several; see `gregale.programs.plan.island.island_of`
    - `tell`: is given a line before and after the compiler is asked
    """

    link_gbit_per_second: float | None
    count: int | None
    tell: Callable[[str], object]


def search(config: TrainConfig, tokens: int, target: Target, asked: Asked) -> Found:
    """Looks for the fastest candidate that fits.

    Raises:
        UserError: the configuration does not fit the devices, or it has a pipeline.
    """
    if config.pipeline is not None:
        raise UserError(
            "search: the configuration has a pipeline, whose memory has no closed form to begin with. `gregale plan` "
            "without --search tells what one configuration takes."
        )
    setup = setup_for(config, tokens, target)
    compute = setup.config.compute
    unroll = execution(compute, setup.layout, setup.config.model).unroll
    configured = Candidate(compute.remat, setup.config.batch.microbatches, unroll, compute.gather)
    compiler = _Compiler(setup, tokens, target, asked)
    weighed, left_out = weighed_candidates(setup, target, unroll, compiler.bandwidth)
    possible = [each for each in weighed if each.closed_form_peak <= DOUBT * target.memory_bytes]
    for each in [each for each in possible if each.candidate == configured] + possible:
        if compiler.is_worth(each):
            compiler.ask(each)
    if not compiler.fitting():
        compiler.ask(min(weighed, key=lambda each: each.closed_form_peak))
    if not target.simulated and unroll < UNROLLED and compiler.fitting():
        left_out += compiler.try_unrolled(compiler.fitting()[0])
    best = next(iter(compiler.fitting()), None)
    answers = compiler.answers
    return Found(
        weighed=[answers.pop(each.candidate, each) for each in weighed] + [*answers.values()],
        best=best,
        configured=configured,
        memory=compiler.memory,
        left_out=left_out,
        remedies=[] if best is not None or compiler.smallest is None else compiler.remedies(compiler.smallest),
    )


def scheduled_seconds(plan: Plan, bandwidth: float | None) -> float:
    """A step's time by its schedule: inside a slice what is asynchronous is hidden as far as there is something else.

    Between slices there is next to nothing behind which it could be, so all of it is added, as what is synchronous.
    """
    bound = plan.roofline(bandwidth)
    inside = [each for each in plan.step.audit.collectives if each.link == INSIDE]
    sent, hidden = (
        sum(each.bytes_sent * (each.times or 1) for each in some)
        for some in (inside, [each for each in inside if each.is_async])
    )
    beside = bound.links[INSIDE] * (hidden / sent if sent else 0.0)
    return max(bound.compute, bound.memory, bound.host, beside) + sum(bound.links.values()) - beside


class _Compiler:
    """What the compiler was asked so far.

    - `answers`: by candidate
    - `memory`: bytes of a device for programs, as far as the compiler has told
    - `smallest`: of the programs that do not fit the one that takes least
    """

    def __init__(self, setup: Setup, tokens: int, target: Target, asked: Asked):
        self._setup, self._tokens, self._target, self._asked = setup, tokens, target, asked
        link = link_bytes_per_second(target, setup, asked.link_gbit_per_second)
        self.bandwidth = None if link is None else link / devices_of_a_replica(setup)
        self.answers: dict[Candidate, ScoredCandidate] = {}
        self.memory = target.memory_bytes
        self.smallest: Plan | None = None

    def fitting(self) -> list[ScoredCandidate]:
        """Those that fit, the fastest first."""
        return sorted((each for each in self.answers.values() if each.fits), key=lambda each: each.seconds or 0.0)

    def is_worth(self, weighed: ScoredCandidate) -> bool:
        """Whether to ask: not if enough fit, and not of what fits or does not fit because another one does."""
        if weighed.candidate in self.answers or len(self.answers) >= MOST_COMPILED or len(self.fitting()) >= ENOUGH:
            return False
        mine = weighed.candidate
        for other in self.answers.values():
            more = mine.microbatches - other.candidate.microbatches
            alike = replace(mine, microbatches=other.candidate.microbatches) == other.candidate
            slower = weighed.closed_form_seconds >= other.closed_form_seconds
            if alike and (more > 0 and slower if other.fits else more < 0):
                return False
        return True

    def ask(self, weighed: ScoredCandidate) -> None:
        """Compiles the programs of a candidate as far as the memory report."""
        candidate, start = weighed.candidate, time.monotonic()
        if candidate in self.answers:
            return
        self._asked.tell(f"{candidate}: compiling")
        plan = plan_step(candidate.of(self._setup.config), self._tokens, self._target, MEMORY)
        peak = self._peak(plan)
        fits = peak <= plan.memory_bytes
        answer = replace(weighed, peak=peak, seconds=scheduled_seconds(plan, self.bandwidth), fits=fits)
        self.answers[candidate] = answer
        self.memory = min(self.memory, plan.memory_bytes)
        if not fits and (self.smallest is None or peak < self.smallest.memory.peak):
            self.smallest = plan
        verdict = "fits" if fits else "does not fit"
        self._asked.tell(
            f"    {size(peak)} of {size(plan.memory_bytes)}, {verdict}; a step takes {answer.seconds:.3g} s by the "
            f"estimate; compiled in {time.monotonic() - start:.0f} s"
        )

    def remedies(self, plan: Plan) -> list[Remedy]:
        """What would take less than a plan that does not fit; the compiler is asked of all that are to fit."""
        return sorted(map(self._checked, remedies(plan, self._tokens)), key=cost)

    def _checked(self, remedy: Remedy) -> Remedy:
        if not remedy.fits:
            return remedy
        self._asked.tell(f"{remedy.change}: compiling")
        plan = plan_step(remedy.config, self._tokens, self._target, MEMORY)
        peak = self._peak(plan)
        return replace(remedy, peak_bytes=peak, fits=peak <= plan.memory_bytes, compiled=True)

    def _peak(self, plan: Plan) -> int:
        return memory_of(plan, island_of(plan.setup, self._asked.count))["peak"]

    def try_unrolled(self, best: ScoredCandidate) -> list[str]:
        """Asks for the best with layers unrolled; the reasons if it cannot be."""
        candidate = replace(best.candidate, unroll=UNROLLED)
        try:
            self.ask(ScoredCandidate(candidate, best.closed_form_peak, best.closed_form_seconds))
        except UserError as error:
            return [str(error)]
        return []
