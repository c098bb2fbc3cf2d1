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
from itertools import product
from typing import Any

import yaml

from gregale.audit.placement import INSIDE
from gregale.audit.roofline import roofline
from gregale.communication.accumulate import rows_per_part
from gregale.errors import UserError
from gregale.model.config import GATHER, REMAT
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.island import island_of
from gregale.programs.plan.remedies import Remedy, remedies
from gregale.programs.plan.report import link_bytes_per_second, memory_of
from gregale.programs.plan.shapes import devices_of_a_replica, estimate, estimated_link_bytes, estimated_work
from gregale.programs.plan.step import MEMORY, Plan, plan_step, setup_for
from gregale.programs.plan.text import size
from gregale.programs.run.setup import Setup
from gregale.services.config import TrainConfig

ENOUGH = 3  # candidates that fit, by the compiler
MOST_COMPILED = 8
DOUBT = 1.25  # a closed form above so many times the memory is believed
UNROLLED = 2  # layers, tried of the best where the compiler shows what it overlaps


@dataclass(frozen=True)
class Candidate:
    """What is chosen.

    - `remat`, `unroll`, `gather`: of `compute`
    - `microbatches`: of `batch`
    """

    remat: str
    microbatches: int
    unroll: int
    gather: str

    def of(self, config: TrainConfig) -> TrainConfig:
        """A configuration with this choice."""
        compute = replace(config.compute, remat=self.remat, unroll=self.unroll, gather=self.gather)
        return replace(config, compute=compute, batch=replace(config.batch, microbatches=self.microbatches))

    def yaml(self) -> str:
        """The keys to set."""
        compute = {"remat": self.remat, "gather": self.gather, "unroll": self.unroll}
        return yaml.safe_dump({"batch": {"microbatches": self.microbatches}, "compute": compute}, sort_keys=False)

    def __str__(self) -> str:
        return f"remat {self.remat}, microbatches {self.microbatches}, unroll {self.unroll}, gather {self.gather}"


@dataclass(frozen=True)
class Weighed:
    """A candidate with what is known of it.

    - `closed_form_peak`, `closed_form_seconds`: of a step, nothing being overlapped
    - `peak`, `seconds`, `fits`: by the compiler, see `scheduled_seconds`; None: it was not asked
    """

    candidate: Candidate
    closed_form_peak: int
    closed_form_seconds: float
    peak: int | None = None
    seconds: float | None = None
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        figures = {key: value for key, value in vars(self).items() if key != "candidate"}
        return {**asdict(self.candidate), **figures}


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

    weighed: list[Weighed]
    best: Weighed | None
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
            "remedies": [asdict(each) for each in self.remedies],
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
        remedies=[] if best is not None or compiler.smallest is None else remedies(compiler.smallest, tokens),
    )


def weighed_candidates(
    setup: Setup, target: Target, unroll: int, bandwidth: float | None
) -> tuple[list[Weighed], list[str]]:
    """All candidates with so many layers unrolled by the closed forms, the fastest first; and why some are impossible.

    - `bandwidth`: bytes a second that a device sends between slices; None: the chip's share of its network
    """
    found, left_out = [], {}
    rows = rows_per_part(setup.config.batch.size, setup.layout, 1)
    for remat, gather in product(REMAT, GATHER):
        for microbatches in (count for count in range(1, rows + 1) if rows % count == 0):
            candidate = Candidate(remat, microbatches, unroll, gather)
            changed = replace(setup, config=candidate.of(setup.config))
            try:
                execution(changed.config.compute, setup.layout, setup.config.model)
            except UserError as error:
                left_out[str(error)] = None
                continue
            peak = estimate(changed, target.backend).peak
            found.append(Weighed(candidate, peak, _closed_form_seconds(changed, target, bandwidth)))
    return sorted(found, key=lambda each: each.closed_form_seconds), [*left_out]


def _closed_form_seconds(setup: Setup, target: Target, bandwidth: float | None) -> float:
    work = estimated_work(setup, estimated_link_bytes(setup))
    return roofline(work, target.chip, target.devices_a_chip, bandwidth).one_after_another


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
        self.answers: dict[Candidate, Weighed] = {}
        self.memory = target.memory_bytes
        self.smallest: Plan | None = None

    def fitting(self) -> list[Weighed]:
        """Those that fit, the fastest first."""
        return sorted((each for each in self.answers.values() if each.fits), key=lambda each: each.seconds or 0.0)

    def is_worth(self, weighed: Weighed) -> bool:
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

    def ask(self, weighed: Weighed) -> None:
        """Compiles the programs of a candidate as far as the memory report."""
        candidate, start = weighed.candidate, time.monotonic()
        if candidate in self.answers:
            return
        self._asked.tell(f"{candidate}: compiling")
        plan = plan_step(candidate.of(self._setup.config), self._tokens, self._target, MEMORY)
        peak = memory_of(plan, island_of(plan.setup, self._asked.count))["peak"]
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

    def try_unrolled(self, best: Weighed) -> list[str]:
        """Asks for the best with layers unrolled; the reasons if it cannot be."""
        candidate = replace(best.candidate, unroll=UNROLLED)
        try:
            self.ask(Weighed(candidate, best.closed_form_peak, best.closed_form_seconds))
        except UserError as error:
            return [str(error)]
        return []
