"""Provides the search for the fastest step that fits, and the remedies for one that does not.

A search combines mesh x remat x microbatches x gather, or a pipeline's keys. It ranks all candidates by lower bounds
of their time (`candidates.Bounds`), and compiles the most promising to the memory report: peaks and transfers are the
compiler's. What a mesh adds to its bound is learnt from its first compiled candidate, and expected of meshes that split
more. The search ends when enough fit and none of the others promises more. It tries unrolled layers only at the end,
because memory reports tell no overlap. Replicas stay, and so do attention and the batch, which changes results.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

from gregale.errors import UserError
from gregale.programs.plan.candidates import (
    MICROBATCHES,
    UNROLL,
    Bounds,
    Candidate,
    Change,
    RankedCandidate,
    candidate_of,
    changes,
    flags,
    on_other_meshes,
    ranked_candidates,
    setups,
)
from gregale.programs.plan.devices import Target
from gregale.programs.plan.estimates import devices_of_a_replica
from gregale.programs.plan.report import joining_costs, link_bytes_per_second, memory_of
from gregale.programs.plan.step import MEMORY, Plan, plan_step, setup_for
from gregale.programs.plan.text import size
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig

ENOUGH = 3  # candidates that fit
MAX_COMPILED = 24
MAX_OF_A_KIND = 3  # compiled changes of one kind, until one fits
MAX_MESHES = 8  # compiled changes of several keys, until one fits
SHOWN_REMEDIES = 3
UNROLLED = 2  # layers to unroll in the best candidate, if the compiler reports overlap
PROCESSES = max(1, min(4, os.cpu_count() or 1))  # that compile at the same time
ALIKE = 1.01  # steps whose times differ by no more than this factor take the same time
RULE = "the shortest step by the schedule of the compiled candidates that fit; within 1% of it, the configured one"
SPLITTING = ("mesh.stage", "mesh.context", "mesh.model")  # axes that add transfers of activations


@dataclass(frozen=True)
class Remedy:
    """A compiled change of the configuration that needs less memory."""

    change: str  # options of the command
    peak_bytes: int  # on a device, of the largest program
    fits: bool  # whether it is within the chip's memory
    step_time: float  # as a multiple of the present one, both as by `Plan.seconds`


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    ranked: list[RankedCandidate]  # all candidates, the lowest bound first; unrolled ones last
    best: RankedCandidate | None  # the fastest that fits; None: no compiled candidate fits
    configured: Candidate  # the candidate of the configuration
    memory: int  # bytes of a device for programs
    tokens: int  # of a step
    left_out: dict[str, int]  # number of impossible candidates by reason
    smallest: Candidate | None = None  # if nothing fits, the one that needs the least
    remedies: list[Remedy] = field(default_factory=list)  # its changes that need less memory

    def to_dict(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "tokens_per_step": self.tokens,
            "rule": RULE,
            "fits": self.best is not None,
            "best": None if self.best is None else self._with_rate(self.best),
            "yaml": None if self.best is None else self.best.candidate.yaml(),
            "configured": dict(self.configured.settings),
            "candidates": [self._with_rate(each) for each in self.ranked],
            "left_out": self.left_out,
            "smallest": None if self.smallest is None else self.smallest.yaml(),
            "remedies": [vars(each) for each in self.remedies],
        }

    def _with_rate(self, each: RankedCandidate) -> dict[str, Any]:
        return {**each.to_dict(), "tokens_per_second": self.tokens / (each.seconds or each.bound_seconds)}


@dataclass(frozen=True)
class Compiler:
    """Compiles configurations to the memory report, several at the same time for a topology.

    - `link_gbit_per_second`: a replica's link to the others; None: its chips' share of the network
    - `count`: number of runs that a network joins, if it joins this one; see `Section.costs`
    - `report`: takes a line before and after each compilation
    """

    tokens: int
    target: Target
    link_gbit_per_second: float | None
    count: int | None
    report: Callable[[str], object]

    @property
    def processes(self) -> int:
        return 1 if self.target.topology is None else PROCESSES

    def plans(self, given: Sequence[tuple[str, TrainConfig]]) -> list[Plan | UserError]:
        """Return the plans of configurations, or why one cannot be compiled; each has a name for the report."""
        return at_once([lambda each=each: self._plan(*each) for each in given], self.processes)

    def _plan(self, name: str, config: TrainConfig) -> Plan:
        start = time.monotonic()
        self.report(f"{name}: compiling")
        plan = plan_step(config, self.tokens, self.target, MEMORY)
        peak = self.peak(plan)
        verdict = "fits" if peak <= plan.memory_bytes else "does not fit"
        self.report(
            f"    {name}: {size(peak)} of {size(plan.memory_bytes)}, {verdict}; a step takes {self.seconds(plan):.3g} "
            f"s by the estimate; compiled in {time.monotonic() - start:.0f} s"
        )
        return plan

    def peak(self, plan: Plan) -> int:
        return memory_of(plan, joining_costs(plan.setup, self.count))["peak"]

    def seconds(self, plan: Plan) -> float:
        link = link_bytes_per_second(self.target, plan.setup, self.link_gbit_per_second)
        return plan.seconds(None if link is None else link / devices_of_a_replica(plan.setup))


def at_once(calls: Sequence[Callable[[], Any]], most: int) -> list[Any]:
    """Return the results of calls, or their `UserError`, `most` at the same time; raise any other error.

    The threads end with the process.
    """
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    for first in range(0, len(calls), most):
        threads = [Thread(target=run, args=(number,), daemon=True) for number in range(first, len(calls))[:most]]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for each in found.values():
            if isinstance(each, BaseException) and not isinstance(each, UserError):
                raise each
    return [found[number] for number in range(len(calls))]


def search(config: TrainConfig, compiler: Compiler) -> Found:
    """Return the fastest candidate that fits. Raises `UserError` if the devices do not suit."""
    target, tokens, left_out = compiler.target, compiler.tokens, Counter[str]()
    setup = setup_for(config, tokens, target)
    if config.mapping.leaves_experts_open:
        raise UserError(
            "search: mapping.compute.experts is auto, which may differ between candidates. Search with null, which "
            "gathers experts, and with data."
        )
    ranked, configured = all_candidates(setup, tokens, target, left_out), candidate_of(setup)
    compiler.report(f"{len(ranked)} candidates by their bounds")
    known = _Known(setup, compiler)
    own = [each for each in ranked if each.candidate == configured]
    known.ask(own or [RankedCandidate(configured, *Bounds(tokens, target).of(setup))])
    if configured not in known.answers:
        raise UserError(*known.left_out)
    while asked := known.most_promising(ranked):
        known.ask(asked)
    if known.fitting and not target.simulated:
        known.ask_unrolled(known.fitting[0])
    left_out += known.left_out
    best, answers = known.best(configured), dict(known.answers)
    smallest = min(known.refused, key=compiler.peak) if best is None else None
    return Found(
        ranked=[answers.pop(each.candidate, each) for each in ranked] + [*answers.values()],
        best=best,
        configured=configured,
        memory=min([target.memory_bytes, *(plan.memory_bytes for plan in known.refused)]),
        tokens=config.batch.tokens,
        left_out=dict(left_out),
        smallest=None if smallest is None else candidate_of(smallest.setup),
        remedies=[] if smallest is None else remedies(smallest, compiler),
    )


def all_candidates(setup: Setup, tokens: int, target: Target, left_out: Counter[str]) -> list[RankedCandidate]:
    """Return the candidates on all meshes, the lowest bound first; `left_out` counts impossible ones by reason.

    Of equal bounds the first has the present mesh, and then the one that splits less, in fewer microbatches.
    """
    now, bounds = candidate_of(setup), Bounds(tokens, target)
    found = [each for one in setups(setup, tokens, left_out) for each in ranked_candidates(one, bounds, left_out)]

    def order(each: RankedCandidate) -> tuple:
        settings, own = dict(each.candidate.settings), dict(now.settings)
        mesh = [key for key in own if key.startswith("mesh.")]
        others = any(settings[key] != own[key] for key in mesh)
        return each.bound_seconds, others, [settings.get(key, 1) for key in SPLITTING], settings[MICROBATCHES]

    return sorted(found, key=order)


@dataclass
class _Known:
    """Results of the compilations so far: by candidate, the plans that do not fit, and what cannot be compiled."""

    setup: Setup
    compiler: Compiler
    answers: dict[Candidate, RankedCandidate] = field(default_factory=dict)
    refused: list[Plan] = field(default_factory=list)
    asked: set[Candidate] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def fitting(self) -> list[RankedCandidate]:
        """Return the candidates that fit, the fastest first."""
        return sorted((each for each in self.answers.values() if each.fits), key=lambda each: each.seconds or 0.0)

    def best(self, configured: Candidate) -> RankedCandidate | None:
        """Return the fastest candidate that fits, or the configured one if it is as fast; None: no one fits."""
        fastest, own = next(iter(self.fitting), None), self.answers.get(configured)
        if fastest is None or own is None or not own.fits:
            return fastest
        return own if (own.seconds or 0.0) <= ALIKE * (fastest.seconds or 0.0) else fastest

    def most_promising(self, ranked: Iterable[RankedCandidate]) -> list[RankedCandidate]:
        """Return the next candidates to compile: none if enough fit and no other promises more, or at the limit."""
        count = min(self.compiler.processes, MAX_COMPILED - len(self.asked))
        others = [each for each in ranked if each.candidate not in self.asked | self.answers.keys()]
        every = ((self._is_doubtful(each), self._expected(each), number) for number, each in enumerate(others))
        found = [others[number] for doubtful, seconds, number in sorted(every) if self._promises(doubtful, seconds)]
        return found[: max(0, count)]

    def _promises(self, doubtful: bool, seconds: float) -> bool:
        fitting = self.fitting
        return len(fitting) < ENOUGH or (not doubtful and seconds < (fitting[0].seconds or 0.0))

    def _expected(self, each: RankedCandidate) -> float:
        """Return the bound and what compiled candidates add to it whose mesh splits no more, or else the least."""
        added = [((known.seconds or 0) - known.bound_seconds, known.candidate) for known in self.answers.values()]
        own = dict(each.candidate.settings)
        like = [
            more
            for more, other in added
            if all(dict(other.settings).get(key, 1) <= own.get(key, 1) for key in SPLITTING)
        ]
        return each.bound_seconds + max([min((more for more, _ in added), default=0.0), *like])

    def _is_doubtful(self, each: RankedCandidate) -> bool:
        """Return whether the bound of a candidate's peak does not fit, or a candidate that may need less does not.

        It is on the same mesh, with as many microbatches, and no lower bound of its time.
        """
        if each.bound_bytes > self.compiler.target.memory_bytes:
            return True
        mine = dict(each.candidate.settings)
        mesh = [key for key in mine if key.startswith("mesh.")]
        for other in self.answers.values():
            theirs = dict(other.candidate.settings)
            same = all(mine[key] == theirs[key] for key in mesh) and theirs[MICROBATCHES] >= mine[MICROBATCHES]
            if same and not other.fits and other.bound_seconds >= each.bound_seconds:
                return True
        return False

    def ask(self, ranked: Sequence[RankedCandidate]) -> None:
        """Compile the programs of some candidates to the memory report; count those that cannot be compiled."""
        config, compiler = self.setup.config, self.compiler
        plans = compiler.plans([(str(each.candidate), each.candidate.of(config)) for each in ranked])
        for each, plan in zip(ranked, plans, strict=True):
            self.asked.add(each.candidate)
            if isinstance(plan, UserError):
                self.left_out[str(plan)] += 1
                continue
            peak = compiler.peak(plan)
            fits = peak <= plan.memory_bytes
            self.answers[each.candidate] = replace(each, peak=peak, seconds=compiler.seconds(plan), fits=fits)
            self.refused += [] if fits else [plan]

    def ask_unrolled(self, best: RankedCandidate) -> None:
        """Compile the best candidate with unrolled layers; a pipeline has no such key."""
        if dict(best.candidate.settings).get(UNROLL, UNROLLED) < UNROLLED:
            self.ask([replace(best, candidate=best.candidate.changed(UNROLL, UNROLLED))])


def remedies(plan: Plan, compiler: Compiler) -> list[Remedy]:
    """Return the cheapest compiled changes that need less memory: fitting ones first, by step time.

    Of each kind of single change it compiles some, the cheapest first, until one fits. If none fits, it changes several
    keys together, on one mesh after another.
    """
    setup, now, seconds = plan.setup, compiler.peak(plan), compiler.seconds(plan)
    bounds, found = Bounds(compiler.tokens, plan.target), list[tuple[Remedy, int]]()

    def compiled(some: Sequence[tuple[int, Change]]) -> None:
        plans = compiler.plans([(flags(keys), config) for _, (keys, config) in some])
        for (kind, (keys, _)), own in zip(some, plans, strict=True):
            if isinstance(own, UserError):
                continue
            peak = compiler.peak(own)
            remedy = Remedy(flags(keys), peak, peak <= own.memory_bytes, compiler.seconds(own) / seconds)
            found.append((remedy, kind))

    kinds = dict(enumerate(changes(setup, compiler.tokens, bounds)))
    for number in range(MAX_OF_A_KIND):
        done = {kind for remedy, kind in found if remedy.fits}
        compiled([(kind, own[number]) for kind, own in kinds.items() if kind not in done and number < len(own)])
    others = [] if any(remedy.fits for remedy, _ in found) else on_other_meshes(setup, compiler.tokens, bounds)
    for first in range(0, min(len(others), MAX_MESHES), compiler.processes):
        if not any(remedy.fits for remedy, _ in found):
            compiled([(-1, each) for each in others[first : first + compiler.processes]])
    smaller = {remedy.change: remedy for remedy, _ in found if remedy.peak_bytes < now}
    return sorted(smaller.values(), key=cost)[:SHOWN_REMEDIES]


def cost(remedy: Remedy) -> tuple:
    """Return the sort key: those that fit by step time, then the others by peak."""
    return (not remedy.fits, remedy.step_time if remedy.fits else remedy.peak_bytes)
