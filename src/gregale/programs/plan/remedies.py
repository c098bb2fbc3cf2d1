"""Provides configuration changes for a step that does not fit, with their effects in closed form."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gregale.audit.estimate import Estimate, is_compared
from gregale.axes.layout import make_mesh, slice_of
from gregale.errors import UserError
from gregale.methods.traffic import SYNCHRONISE
from gregale.model.execution import TO_HOST
from gregale.programs.plan.candidates import (
    Key,
    candidate_of,
    changed_setup,
    keys_of,
    scored_candidates,
    setups,
)
from gregale.programs.plan.shapes import estimate, has_closed_forms, step_shape, tree_bytes
from gregale.programs.plan.step import Plan
from gregale.programs.plan.step_seconds import closed_form_seconds
from gregale.programs.runtime.expert_parallelism import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig

SHOWN = 3
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

    change: str  # options of the command
    peak_bytes: int  # on a device, of the largest program
    fits: bool  # whether it is within the chip's memory
    step_time: float  # of the roofline without overlap, as a multiple of the present one
    config: TrainConfig  # with the change
    range: tuple[int, int]  # bytes between which the compiler's peak lies
    range_fits: bool = False  # the whole range is within the chip's memory
    certain: bool = False  # so it is, and steps of these sizes were compared
    compiled: bool = False  # the peak is the compiler's

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "config"}


def remedies(plan: Plan, tokens: int) -> list[Remedy]:
    """Return the cheapest changes that need less memory, one of each kind: fitting ones first, then by step time.

    If no single change fits, the remedies change several keys together, on each mesh. The list is empty for a model
    whose memory has no closed form.
    """
    if not has_closed_forms(plan.setup):
        return []
    kinds = [*(_values(plan.setup, key) for key in keys_of(plan.setup.config)), _on_meshes(plan.setup, tokens)]
    best = [min(found, key=cost) for kind in kinds if (found := list(_evaluated(plan, kind)))]
    if not any(each.fits for each in best):
        best += _together(plan, tokens, {each.change for each in best})
    return sorted(best, key=cost)[:SHOWN]


def cost(remedy: Remedy) -> tuple:
    """Return the sort key: those whose range fits by step time, those that probably fit, then the others by peak."""
    safer = remedy.range_fits or (remedy.fits and remedy.compiled)
    return (not safer, not remedy.fits, remedy.step_time if remedy.fits else remedy.peak_bytes)


Changes = Iterator[tuple[str, Setup]]


def _values(setup: Setup, key: Key) -> Changes:
    """Yield the other values of a key, without transfers to the host, which only changes of several keys have."""
    now = candidate_of(setup)
    for value in key.values(setup):
        if value != now[key.name] and value not in TO_HOST:
            with suppress(UserError):
                yield flags({key.name: value}), changed_setup(setup, now.changed(key.name, value))


def _mesh(setup: Setup) -> Iterator[tuple[str, TrainConfig]]:
    """Yield meshes with devices moved from an axis to one that splits more."""
    sizes = dict(setup.layout.mesh.shape)
    for source, to in MOVES:
        factor = 2
        while factor <= sizes[source] and sizes[source] % factor == 0:
            moved = {**sizes, source: sizes[source] // factor, to: sizes[to] * factor}
            mesh = replace(setup.config.mesh, **moved)
            yield flags({f"mesh.{axis}": moved[axis] for axis in (source, to)}), replace(setup.config, mesh=mesh)
            factor *= 2


def _on_meshes(setup: Setup, tokens: int) -> Changes:
    """Yield the possible ones of `_mesh`."""
    for text, config in _mesh(setup):
        with suppress(UserError):
            yield text, set_up(config, tokens, make_mesh(config.mesh, list(setup.layout.mesh.devices.flat)))


def _evaluated(plan: Plan, changes: Changes) -> Iterator[Remedy]:
    """Return the changes that take less memory."""
    backend, trees = plan.target.backend, tree_bytes(plan.setup)
    before = estimate(plan.setup, backend, trees)
    seconds = closed_form_seconds(plan.setup, plan.target, None, trees)
    for change, setup in changes:
        own = trees if setup.layout == plan.setup.layout else tree_bytes(setup)
        peak = _peak(plan, before, estimate(setup, backend, own))
        if peak < plan.memory.peak:
            time = closed_form_seconds(setup, plan.target, None, own) / seconds
            yield _remedy(plan, change, peak, time, setup)


def _together(plan: Plan, tokens: int, offered: set[str]) -> Iterator[Remedy]:
    """Yield for each mesh the fastest settings of all keys that fit, or the smallest, unless they are already offered.

    The meshes are those of a search, and those with devices moved from `replica`.
    """
    before, seconds = estimate(plan.setup, plan.target.backend), closed_form_seconds(plan.setup, plan.target, None)
    for setup in setups(plan.setup, tokens, Counter(), _replicas(plan.setup)):
        scored = scored_candidates(setup, plan.target, None, Counter())
        likely = [each for each in scored if each.closed_form_peak <= plan.memory_bytes]
        safer = [each for each in likely if each.closed_form_range[1] <= plan.memory_bytes]
        best = next(iter(safer or likely), None) or min(scored, key=lambda each: each.closed_form_peak)
        setup = replace(setup, config=best.candidate.of(setup.config))
        change = _changed_keys(plan.setup, setup)
        after = estimate(setup, plan.target.backend)
        peak = max(best.closed_form_peak, _joined(plan, before, after))
        if change and change not in offered and peak < plan.memory.peak:
            yield _remedy(plan, change, peak, best.closed_form_seconds / seconds, setup)


def _replicas(setup: Setup) -> Iterator[int]:
    """Yield the sizes of `mesh.replica` whose other devices may move to another axis, the present one first."""
    slices = len({slice_of(device) for device in setup.layout.mesh.devices.flat})
    now = setup.layout.mesh.shape["replica"]
    yield from (each for each in range(now, 0, -1) if now % each == 0 and each % slices == 0)


def _remedy(plan: Plan, change: str, peak: int, step_time: float, setup: Setup) -> Remedy:
    backend, memory = plan.target.backend, plan.memory_bytes
    between = backend.range(peak)
    fits, compared = between[1] <= memory, is_compared(step_shape(setup), backend)
    return Remedy(change, peak, peak <= memory, step_time, setup.config, between, fits, fits and compared)


def _changed_keys(now: Setup, then: Setup) -> str:
    """Return the options that change the first setup into the second."""
    before, after = (
        {f"mesh.{axis}": size for axis, size in each.layout.mesh.shape.items()} | dict(candidate_of(each).settings)
        for each in (now, then)
    )
    return flags({key: value for key, value in after.items() if value != before.get(key)})


def flags(settings: dict[str, Any]) -> str:
    """Return settings by key as options of a command, such as `--mesh.data 4 --mesh.model 2`."""
    return " ".join(f"--{key} {value}" for key, value in settings.items())


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
