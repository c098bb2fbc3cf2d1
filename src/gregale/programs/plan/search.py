"""Provides the search for the fastest step that fits: mesh x remat x microbatches x gather, or a pipeline's keys.

The search scores all candidates by the closed forms of memory and time. It then compiles them to the memory report, the
fastest first, until enough fit; the result is the fastest of these by its schedule. It tries unrolled layers only at
the end, because the closed forms do not include the overlap of unrolling. Replicas stay, and so do attention and the
batch, which changes results.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gregale.errors import UserError
from gregale.programs.plan.candidates import (
    MICROBATCHES,
    UNROLL,
    Candidate,
    Remedy,
    ScoredCandidate,
    candidate_of,
    cost,
    remedies,
    scored_candidates,
    setups,
)
from gregale.programs.plan.devices import Target
from gregale.programs.plan.estimates import devices_of_a_replica, has_closed_forms
from gregale.programs.plan.report import joining_costs, link_bytes_per_second, memory_of
from gregale.programs.plan.step import MEMORY, Plan, plan_step, scheduled_seconds, setup_for
from gregale.programs.plan.text import size
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.rules import lacking

ENOUGH = 3  # candidates that fit, by the compiler
MAX_COMPILED = 8
MAX_UNCERTAIN = 3  # of them, candidates that did not fit, while closed forms leave it open whether others do
UNROLLED = 2  # layers to unroll in the best candidate, if the compiler reports overlap
RULE = "the shortest step by the schedule of the compiled candidates that fit"


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    scored: list[ScoredCandidate]  # all candidates, the fastest by the closed form first; unrolled ones last
    best: ScoredCandidate | None  # the fastest that fits; None: no compiled candidate fits
    configured: Candidate  # the candidate of the configuration
    memory: int  # bytes of a device for programs
    tokens: int  # of a step
    left_out: dict[str, int]  # number of impossible candidates by reason
    remedies: list[Remedy]  # if nothing fits, changes that need less memory than the smallest candidate

    def to_dict(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "tokens_per_step": self.tokens,
            "rule": RULE,
            "fits": self.best is not None,
            "best": None if self.best is None else self._with_rate(self.best),
            "yaml": None if self.best is None else self.best.candidate.yaml(),
            "configured": dict(self.configured.settings),
            "candidates": [self._with_rate(each) for each in self.scored],
            "left_out": self.left_out,
            "remedies": [each.to_dict() for each in self.remedies],
        }

    def _with_rate(self, each: ScoredCandidate) -> dict[str, Any]:
        return {**each.to_dict(), "tokens_per_second": self.tokens / (each.seconds or each.closed_form_seconds)}


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search besides the configuration."""

    link_gbit_per_second: float | None  # a replica's link to the others; None: its chips' share of the network
    count: int | None  # number of runs that a network joins, if it joins this one; see `Section.costs`
    report: Callable[[str], object]  # takes a line before and after each compilation


def search(config: TrainConfig, tokens: int, target: Target, options: SearchOptions) -> Found:
    """Return the fastest candidate that fits.

    Raises `UserError` for a model without closed forms, or if the devices do not suit.
    """
    setup = setup_for(config, tokens, target)
    if not has_closed_forms(setup):
        raise UserError(f"search: {lacking(config)} So a search has nothing to start from.")
    if config.mapping.leaves_experts_open:
        raise UserError(
            "search: mapping.compute.experts is auto, which may differ between candidates. Search with null, which "
            "gathers experts, and with data."
        )
    configured, compiler = candidate_of(setup), _Compiler(setup, tokens, target, options)
    scored, left_out = all_candidates(setup, tokens, target, compiler.bandwidth)
    options.report(f"{len(scored)} candidates by closed forms")
    possible = [each for each in scored if each.closed_form_range[0] <= target.memory_bytes]
    for each in [each for each in possible if each.candidate == configured] + possible:
        if compiler.is_worth(each):
            compiler.ask(each)
    if not compiler.fitting():
        compiler.ask(min(scored, key=lambda each: each.closed_form_peak))
    if not target.simulated and compiler.fitting():
        left_out += compiler.try_unrolled(compiler.fitting()[0])
    best = next(iter(compiler.fitting()), None)
    answers = compiler.answers
    return Found(
        scored=[answers.pop(each.candidate, each) for each in scored] + [*answers.values()],
        best=best,
        configured=configured,
        memory=compiler.memory,
        tokens=config.batch.tokens,
        left_out=dict(+left_out),
        remedies=[] if best is not None or compiler.smallest is None else compiler.remedies(compiler.smallest),
    )


def all_candidates(
    setup: Setup, tokens: int, target: Target, bandwidth: float | None
) -> tuple[list[ScoredCandidate], Counter[str]]:
    """Return the candidates on all meshes, the fastest first, and the number of impossible ones by reason.

    Of equal times the first has the present mesh, and then the smaller peak.
    """
    left_out: Counter[str] = Counter()
    now = dict(setup.layout.mesh.shape)
    found = [
        (each.closed_form_seconds, dict(on_a_mesh.layout.mesh.shape) != now, each.closed_form_peak, each)
        for on_a_mesh in setups(setup, tokens, left_out)
        for each in scored_candidates(on_a_mesh, target, bandwidth, left_out)
    ]
    return [each for *_, each in sorted(found, key=lambda each: each[:3])], left_out


class _Compiler:
    """Results of the compilations so far.

    - `answers`: results by candidate
    - `memory`: bytes of a device for programs, by the compiler's reports
    - `smallest`: the plan with the smallest peak among those that do not fit
    """

    def __init__(self, setup: Setup, tokens: int, target: Target, options: SearchOptions):
        self._setup, self._tokens, self._target, self._options = setup, tokens, target, options
        link = link_bytes_per_second(target, setup, options.link_gbit_per_second)
        self.bandwidth = None if link is None else link / devices_of_a_replica(setup)
        self.answers: dict[Candidate, ScoredCandidate] = {}
        self.memory = target.memory_bytes
        self.smallest: Plan | None = None

    def fitting(self) -> list[ScoredCandidate]:
        """Return the candidates that fit, the fastest first."""
        return sorted((each for each in self.answers.values() if each.fits), key=lambda each: each.seconds or 0.0)

    def is_worth(self, scored: ScoredCandidate) -> bool:
        """Return whether to compile: not if enough fit, and not if another result already decides whether it fits."""
        if scored.candidate in self.answers or len(self.answers) >= MAX_COMPILED or len(self.fitting()) >= ENOUGH:
            return False
        refused = len(self.answers) - len(self.fitting())
        if refused >= MAX_UNCERTAIN and scored.closed_form_range[1] > self.memory:
            return False
        mine = scored.candidate
        for other in self.answers.values():
            more = mine[MICROBATCHES] - other.candidate[MICROBATCHES]
            alike = mine.changed(MICROBATCHES, other.candidate[MICROBATCHES]) == other.candidate
            slower = scored.closed_form_seconds >= other.closed_form_seconds
            if alike and (more > 0 and slower if other.fits else more < 0):
                return False
        return True

    def ask(self, scored: ScoredCandidate) -> None:
        """Compile the programs of a candidate to the memory report."""
        candidate, start = scored.candidate, time.monotonic()
        if candidate in self.answers:
            return
        self._options.report(f"{candidate}: compiling")
        plan = plan_step(candidate.of(self._setup.config), self._tokens, self._target, MEMORY)
        peak = self._peak(plan)
        fits = peak <= plan.memory_bytes
        answer = replace(scored, peak=peak, seconds=scheduled_seconds(plan, self.bandwidth), fits=fits)
        self.answers[candidate] = answer
        self.memory = min(self.memory, plan.memory_bytes)
        if not fits and (self.smallest is None or peak < self.smallest.memory.peak):
            self.smallest = plan
        verdict = "fits" if fits else "does not fit"
        self._options.report(
            f"    {size(peak)} of {size(plan.memory_bytes)}, {verdict}; a step takes {answer.seconds:.3g} s by the "
            f"estimate; compiled in {time.monotonic() - start:.0f} s"
        )

    def remedies(self, plan: Plan) -> list[Remedy]:
        """Return changes that need less memory than a plan; compile those that fit by their estimates."""
        return sorted(map(self._checked, remedies(plan, self._tokens)), key=cost)

    def _checked(self, remedy: Remedy) -> Remedy:
        if not remedy.fits:
            return remedy
        self._options.report(f"{remedy.change}: compiling")
        plan = plan_step(remedy.config, self._tokens, self._target, MEMORY)
        peak = self._peak(plan)
        return replace(remedy, peak_bytes=peak, fits=peak <= plan.memory_bytes, compiled=True)

    def _peak(self, plan: Plan) -> int:
        return memory_of(plan, joining_costs(plan.setup, self._options.count))["peak"]

    def try_unrolled(self, best: ScoredCandidate) -> Counter[str]:
        """Compile the best candidate with unrolled layers; return the reasons if that is impossible."""
        if dict(best.candidate.settings).get(UNROLL, UNROLLED) >= UNROLLED:
            return Counter()  # also in a pipeline, which has no such key
        try:
            self.ask(replace(best, candidate=best.candidate.changed(UNROLL, UNROLLED)))
        except UserError as error:
            return Counter([str(error)])
        return Counter()
