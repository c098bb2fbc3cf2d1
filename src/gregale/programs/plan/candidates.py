"""Provides settings for a run, with their memory and time in closed form.

They are the candidates that `plan --search` chooses from, and the remedies for a step that does not fit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import yaml

from gregale.axes.layout import make_mesh, slice_of
from gregale.communication.pipeline import GATHER_LEVELS, SAVED
from gregale.communication.reduce import rows_per_part
from gregale.cost.estimate import Estimate, is_compared
from gregale.errors import UserError
from gregale.methods.traffic import SYNCHRONISE
from gregale.model.config import GATHER, REMAT
from gregale.model.execution import TO_HOST, execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.estimates import closed_form_seconds, estimate, has_closed_forms, step_shape, tree_bytes
from gregale.programs.plan.step import Plan
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.rules import check
from gregale.settings import LAYOUT

MESH_AXES = ("stage", "context", "data", "model")  # inside a replica
MICROBATCHES, UNROLL = "batch.microbatches", "compute.unroll"


class Key(NamedTuple):
    """A key of the configuration, and the values that a search tries on a mesh; the search combines all keys."""

    name: str
    values: Callable[[Setup], Iterable[Any]]


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


def _rows(setup: Setup) -> int:
    """Return the rows of a step on a device."""
    return rows_per_part(setup.config.batch.size, setup.layout, 1)


def _gathers(setup: Setup) -> tuple[str, ...]:
    """Return the values of `compute.gather`, which are alike on a mesh that splits no weights."""
    shards = prod(setup.layout.mesh.shape[axis] for axis in ("context", "data"))
    return GATHER if shards > 1 else (setup.config.compute.gather,)


def _unroll(setup: Setup) -> tuple[int]:
    return (execution(setup.config.compute, setup.layout, setup.config.model).unroll,)


def _columns(setup: Setup) -> list[int]:
    """Return the microbatches in a pipeline at a time: multiples of the stages."""
    stages = setup.layout.mesh.shape["stage"]
    return [stages * each for each in _divisors(_rows(setup))]


SCANNED = (
    Key("compute.remat", lambda setup: REMAT),
    Key(MICROBATCHES, lambda setup: _divisors(_rows(setup))),
    Key(UNROLL, _unroll),
    Key("compute.gather", _gathers),
)
PIPELINED = (
    Key("pipeline.remat", lambda setup: (each for each in SAVED if each != "attention")),
    Key(MICROBATCHES, lambda setup: _divisors(_rows(setup))),
    Key("pipeline.repeats", lambda setup: _divisors(setup.config.model.layers // setup.layout.mesh.shape["stage"])),
    Key("pipeline.microbatches", _columns),
    Key("pipeline.gather", lambda setup: GATHER_LEVELS),
)


def keys_of(config: TrainConfig) -> tuple[Key, ...]:
    """Return the keys that a search combines on each mesh."""
    return SCANNED if config.pipeline is None else PIPELINED


@dataclass(frozen=True)
class Candidate:
    """Settings that a search chooses, by key: sizes of the mesh, and those of `keys_of`."""

    settings: tuple[tuple[str, Any], ...]

    def __getitem__(self, key: str) -> Any:
        return dict(self.settings)[key]

    def changed(self, key: str, value: Any) -> "Candidate":
        return Candidate(tuple((name, value if name == key else now) for name, now in self.settings))

    def of(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with these settings."""
        for section, values in self._sections().items():
            config = replace(config, **{section: replace(getattr(config, section), **values)})
        return config

    def yaml(self) -> str:
        return yaml.safe_dump(self._sections(), sort_keys=False)

    def _sections(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, value in self.settings:
            section, _, key = name.partition(".")
            found.setdefault(section, {})[key] = value
        return found

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings)


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate with its estimates.

    - `closed_form_peak`, `closed_form_seconds`: of a step, see `gregale.programs.plan.estimates`
    - `closed_form_range`: bytes between which the compiler's peak lies, if steps of these sizes were `compared`
    - `peak`, `seconds`, `fits`: from the compiled program, see `scheduled_seconds`; None: not compiled
    """

    candidate: Candidate
    closed_form_peak: int
    closed_form_seconds: float
    closed_form_range: tuple[int, int]
    compared: bool
    peak: int | None = None
    seconds: float | None = None
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        estimates = {key: value for key, value in vars(self).items() if key != "candidate"}
        return {"settings": dict(self.candidate.settings), **estimates}


def candidate_of(setup: Setup) -> Candidate:
    """Return the candidate that a configuration is."""
    return Candidate((*_mesh(setup), *((key.name, _value(setup, key.name)) for key in keys_of(setup.config))))


def _mesh(setup: Setup) -> tuple[tuple[str, int], ...]:
    """Return the sizes of the mesh inside a replica; `stage` only with a pipeline."""
    axes = MESH_AXES[setup.config.pipeline is None :]
    return tuple((f"mesh.{axis}", setup.layout.mesh.shape[axis]) for axis in axes)


def _value(setup: Setup, name: str) -> Any:
    """Return the value of a key, with defaults resolved."""
    section, _, key = name.partition(".")
    value = getattr(getattr(setup.config, section), key)
    if value is None:
        schedule = setup.schedule()
        value = _unroll(setup)[0] if name == UNROLL else None if schedule is None else getattr(schedule, key)
    return value


def meshes(setup: Setup, replica: int) -> Iterator[dict[str, int]]:
    """Yield all meshes of as many devices with this number of replicas; with a pipeline, of at least two stages."""
    sizes = {**setup.layout.mesh.shape, "replica": replica}
    devices = setup.layout.mesh.size // sizes["island"] // replica
    piped = setup.config.pipeline is not None
    for stage, context, model in product(_divisors(devices), repeat=3):
        if devices % (stage * context * model) == 0 and (stage > 1) == piped:
            own = (stage, context, devices // (stage * context * model), model)
            yield {**sizes, **dict(zip(MESH_AXES, own, strict=True))}


def setups(setup: Setup, tokens: int, left_out: Counter[str], replicas: Iterable[int] | None = None) -> Iterator[Setup]:
    """Yield the setup on each mesh that the model and the batch divide, with one microbatch; count the others.

    - `replicas`: sizes of `mesh.replica`; None: the present one
    """
    devices = list(setup.layout.mesh.devices.flat)
    for sizes in (each for count in replicas or (setup.layout.replicas,) for each in meshes(setup, count)):
        config = replace(setup.config, mesh=replace(setup.config.mesh, **sizes))
        config = replace(config, batch=replace(config.batch, microbatches=1))
        if config.pipeline is not None:
            config = replace(config, pipeline=replace(config.pipeline, microbatches=None, repeats=1))
        try:
            yield set_up(config, tokens, make_mesh(config.mesh, devices))
        except UserError:
            left_out["meshes that do not divide the heads, rows, tokens or layers"] += 1


def scored_candidates(
    setup: Setup, target: Target, bandwidth: float | None, left_out: Counter[str]
) -> list[ScoredCandidate]:
    """Return all candidates on the mesh of a setup in closed form, the fastest first.

    - `bandwidth`: bytes per second that a device sends between slices; None: the chip's share of its network
    - `left_out`: counts impossible candidates by reason
    """
    found, trees = [], tree_bytes(setup)
    mesh, keys = _mesh(setup), keys_of(setup.config)
    for values in product(*(list(key.values(setup)) for key in keys)):
        candidate = Candidate((*mesh, *zip((key.name for key in keys), values, strict=True)))
        try:
            changed = changed_setup(setup, candidate)
        except UserError as error:
            if setup.config.pipeline is None:  # numbers of a pipeline are combined without regard to one another
                left_out[str(error)] += 1
            continue
        peak = estimate(changed, target.backend, trees).peak
        seconds = closed_form_seconds(changed, target, bandwidth, trees)
        compared = is_compared(step_shape(changed), target.backend)
        found.append(ScoredCandidate(candidate, peak, seconds, target.backend.range(peak), compared))
    return sorted(found, key=lambda each: each.closed_form_seconds)


def changed_setup(setup: Setup, candidate: Candidate) -> Setup:
    """Return a setup with a candidate's settings, on the same mesh; raise `UserError` if they are impossible."""
    config = candidate.of(setup.config)
    execution(config.compute, setup.layout, config.model)
    check(config, setup.layout, LAYOUT)
    return replace(setup, config=config)


SHOWN_REMEDIES = 3
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
    return sorted(best, key=cost)[:SHOWN_REMEDIES]


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


def _moved_meshes(setup: Setup) -> Iterator[tuple[str, TrainConfig]]:
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
    """Yield the possible ones of `_moved_meshes`."""
    for text, config in _moved_meshes(setup):
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
