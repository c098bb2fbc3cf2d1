"""What to change when a step does not fit, each change with its effect in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gregale.audit.memory import Estimate
from gregale.audit.roofline import roofline
from gregale.axes.mesh import make_mesh
from gregale.errors import UserError
from gregale.methods.traffic import SYNCHRONISE
from gregale.model.config import REMAT
from gregale.programs.plan.shapes import estimate, estimated_link_bytes, estimated_work
from gregale.programs.plan.step import Plan
from gregale.programs.run.setup import Setup, set_up
from gregale.services.config import TrainConfig

SHOWN = 3
LARGEST_FACTOR = 64


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration.

    Attributes:
        change: the keys to set.
        peak_bytes: the peak on a device afterwards, of the program that then takes the most: the compiler's of now,
            changed by as many bytes as the closed form changes, or by the same factor, whichever is more.
        fits: whether that is within the chip's memory.
        step_time: of the roofline with nothing overlapped, as a multiple of now's.
    """

    change: str
    peak_bytes: int
    fits: bool
    step_time: float


def remedies(plan: Plan, tokens: int) -> list[Remedy]:
    """The cheapest changes that take less memory: those that fit first, then by step time; one of each kind.

    None for a pipeline, whose memory has no closed form.
    """
    if plan.setup.config.pipeline is not None:
        return []
    kinds = [_microbatches, _remat, _gather, _mesh]
    best = [min(found, key=_cost) for kind in kinds if (found := list(_evaluated(plan, tokens, kind(plan.setup))))]
    return sorted(best, key=_cost)[:SHOWN]


def _cost(remedy: Remedy) -> tuple:
    return (False, remedy.step_time) if remedy.fits else (True, remedy.peak_bytes)


Changes = Iterator[tuple[str, TrainConfig]]


def _microbatches(setup: Setup) -> Changes:
    config, factor = setup.config, 2
    while factor <= LARGEST_FACTOR:
        count = config.batch.microbatches * factor
        yield f"batch.microbatches: {count}", replace(config, batch=replace(config.batch, microbatches=count))
        factor *= 2


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
    """Devices moved from an axis to a faster one, which splits more."""
    sizes = dict(setup.layout.mesh.shape)
    for source, to in (("replica", "data"), ("data", "model"), ("replica", "model")):
        factor = 2
        while factor <= sizes[source] and sizes[source] % factor == 0:
            moved = {**sizes, source: sizes[source] // factor, to: sizes[to] * factor}
            text = ", ".join(f"mesh.{axis}: {moved[axis]}" for axis in (source, to))
            yield text, replace(setup.config, mesh=replace(setup.config.mesh, **moved))
            factor *= 2


def _evaluated(plan: Plan, tokens: int, changes: Changes) -> Iterator[Remedy]:
    """The changes that are possible and take less memory."""
    backend, devices = plan.target.backend, list(plan.setup.layout.mesh.devices.flat)
    before, seconds = estimate(plan.setup, backend), _seconds(plan, plan.setup)
    for change, config in changes:
        try:
            setup = set_up(config, tokens, make_mesh(config.mesh, devices))
        except UserError:
            continue
        after = estimate(setup, backend)
        peak = _peak(plan, before, after)
        if peak < plan.memory.peak:
            yield Remedy(change, peak, peak <= plan.memory_bytes, _seconds(plan, setup) / seconds)


def _peak(plan: Plan, before: Estimate, after: Estimate) -> int:
    """The peak if the closed form changes so; of `synchronise`, which computes no gradients, by its state's part."""

    def changed(name: str, now: int) -> int:
        first, then = (each.arguments if name == SYNCHRONISE else each.peak for each in (before, after))
        return max(now - (first - then), now * then // first)

    return max(changed(name, program.memory.peak) for name, program in plan.programs.items())


def _seconds(plan: Plan, setup: Setup) -> float:
    work = estimated_work(setup, estimated_link_bytes(setup))
    return roofline(work, plan.target.chip, plan.target.devices_a_chip, None).one_after_another
