"""Provides configuration changes for a step that does not fit, with their effects in closed form."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gregale.audit.memory import Estimate
from gregale.axes.mesh import make_mesh
from gregale.errors import UserError
from gregale.methods.traffic import SYNCHRONISE
from gregale.model.config import REMAT
from gregale.model.execution import execution
from gregale.programs.plan.candidates import Candidate, closed_form_seconds, scored_candidates
from gregale.programs.plan.shapes import estimate, has_closed_forms
from gregale.programs.plan.step import Plan
from gregale.programs.runtime.setup import Setup, set_up
from gregale.runs.config import TrainConfig

SHOWN = 3
FACTORS = (2, 4, 8, 16, 32, 64)  # of microbatches
# Of devices, from one axis to another that splits more: rows, then sequences, then layers.
MOVES = (
    ("replica", "data"),
    ("data", "context"),
    ("replica", "context"),
    ("data", "model"),
    ("replica", "model"),
)


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration.

    The new peak is the compiler's present one, changed by the difference or by the factor of the closed form, whichever
    gives more. For several keys together, which change most of the program, it is the closed form.
    """

    change: str  # the keys to set
    peak_bytes: int  # on a device, of the largest program
    fits: bool  # whether it is within the chip's memory
    step_time: float  # of the roofline without overlap, as a multiple of the present one
    config: TrainConfig  # with the change
    range: tuple[int, int]  # bytes between which the compiler's peak lies
    compiled: bool = False  # the peak is the compiler's

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "config"}


def remedies(plan: Plan, tokens: int) -> list[Remedy]:
    """Return the cheapest changes that need less memory, one of each kind: fitting ones first, then by step time.

    If no single change fits, the remedies change several keys together, on each mesh. The list is empty for a pipeline,
    or a model, whose memory has no closed form.
    """
    if plan.setup.config.pipeline is not None or not has_closed_forms(plan.setup):
        return []
    kinds = [_microbatches, _remat, _gather, _mesh]
    best = [min(found, key=cost) for kind in kinds if (found := list(_evaluated(plan, tokens, kind(plan.setup))))]
    if not any(each.fits for each in best):
        best += _together(plan, tokens, {each.change for each in best})
    return sorted(best, key=cost)[:SHOWN]


def cost(remedy: Remedy) -> tuple:
    """Return the sort key: fitting remedies by step time, then the others by peak."""
    return (False, remedy.step_time) if remedy.fits else (True, remedy.peak_bytes)


Changes = Iterator[tuple[str, TrainConfig]]


def _microbatches(setup: Setup) -> Changes:
    config = setup.config
    for factor in FACTORS:
        count = config.batch.microbatches * factor
        yield f"batch.microbatches: {count}", replace(config, batch=replace(config.batch, microbatches=count))


def _remat(setup: Setup) -> Changes:
    config = setup.config
    for policy in REMAT:
        if policy not in (config.compute.remat, "context_offload", "offload"):
            yield f"compute.remat: {policy}", replace(config, compute=replace(config.compute, remat=policy))


def _gather(setup: Setup) -> Changes:
    config = setup.config
    if config.compute.gather == "per_step":
        yield "compute.gather: per_layer", replace(config, compute=replace(config.compute, gather="per_layer"))


def _mesh(setup: Setup) -> Changes:
    """Yield meshes with devices moved from an axis to one that splits more."""
    sizes = dict(setup.layout.mesh.shape)
    for source, to in MOVES:
        factor = 2
        while factor <= sizes[source] and sizes[source] % factor == 0:
            moved = {**sizes, source: sizes[source] // factor, to: sizes[to] * factor}
            text = ", ".join(f"mesh.{axis}: {moved[axis]}" for axis in (source, to))
            yield text, replace(setup.config, mesh=replace(setup.config.mesh, **moved))
            factor *= 2


def _evaluated(plan: Plan, tokens: int, changes: Changes) -> Iterator[Remedy]:
    """Return the changes that are possible and take less memory."""
    backend, devices = plan.target.backend, list(plan.setup.layout.mesh.devices.flat)
    before, seconds = estimate(plan.setup, backend), closed_form_seconds(plan.setup, plan.target, None)
    for change, config in changes:
        try:
            setup = set_up(config, tokens, make_mesh(config.mesh, devices))
        except UserError:
            continue
        after = estimate(setup, backend)
        peak = _peak(plan, before, after)
        if peak < plan.memory.peak:
            time = closed_form_seconds(setup, plan.target, None) / seconds
            yield Remedy(change, peak, peak <= plan.memory_bytes, time, config, backend.range(peak))


def _together(plan: Plan, tokens: int, offered: set[str]) -> Iterator[Remedy]:
    """Yield for each mesh the cheapest remat x microbatches that needs less memory, unless it is already offered."""
    now, devices = plan.setup.config, list(plan.setup.layout.mesh.devices.flat)
    before, seconds = estimate(plan.setup, plan.target.backend), closed_form_seconds(plan.setup, plan.target, None)
    unroll = execution(now.compute, plan.setup.layout, now.model).unroll
    for mesh, config in [("", now), *_mesh(plan.setup)]:
        try:
            whole = replace(config, batch=replace(config.batch, microbatches=1))
            setup = set_up(whole, tokens, make_mesh(config.mesh, devices))
        except UserError:
            continue
        scored, _ = scored_candidates(setup, plan.target, unroll, None, ("per_layer",))
        fitting = [each for each in scored if each.closed_form_peak <= plan.memory_bytes]
        best = fitting[0] if fitting else min(scored, key=lambda each: each.closed_form_peak)
        keys = ", ".join(filter(None, [mesh, *_changed_keys(now, best.candidate)]))
        changed = replace(setup, config=best.candidate.of(config))
        peak = max(best.closed_form_peak, _joined(plan, before, estimate(changed, plan.target.backend)))
        if keys and keys not in offered and peak < plan.memory.peak:
            time = best.closed_form_seconds / seconds
            between = plan.target.backend.range(peak)
            yield Remedy(keys, peak, peak <= plan.memory_bytes, time, changed.config, between)


def _changed_keys(config: TrainConfig, candidate: Candidate) -> list[str]:
    """Return the keys in which a candidate differs from a configuration, with the candidate's values."""
    keys = {"batch.microbatches": (candidate.microbatches, config.batch.microbatches)}
    keys |= {f"compute.{key}": (getattr(candidate, key), getattr(config.compute, key)) for key in ("remat", "gather")}
    return [f"{key}: {value}" for key, (value, before) in keys.items() if value != before]


def _peak(plan: Plan, before: Estimate, after: Estimate) -> int:
    """Return the peak after this change of the closed form."""
    steps = [program.memory.peak for name, program in plan.programs.items() if name != SYNCHRONISE]
    return max(_changed(max(steps), before.peak, after.peak), _joined(plan, before, after))


def _joined(plan: Plan, before: Estimate, after: Estimate) -> int:
    """Return the peak of `synchronise`, scaled by the state because it has no gradients; 0 without such a program."""
    program = plan.programs.get(SYNCHRONISE)
    return 0 if program is None else _changed(program.memory.peak, before.arguments, after.arguments)


def _changed(now: int, first: int, then: int) -> int:
    return max(now - (first - then), now * then // first)
