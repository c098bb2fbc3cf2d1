"""Provides settings for a run: the candidates of `plan --search`, and the changes of a step that does not fit."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import yaml
from jax.sharding import Mesh

from gregale.axes.layout import make_mesh, slice_of
from gregale.communication.pipeline import GATHER_LEVELS, SAVED
from gregale.communication.reduce import rows_per_part
from gregale.cost.chips import EIGHT_BIT
from gregale.errors import UserError
from gregale.model.config import GATHER, REMAT
from gregale.model.execution import TO_HOST, execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.estimates import parameter_use, tree_bytes
from gregale.programs.plan.step import step_work
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
class RankedCandidate:
    """A candidate with lower bounds of a step's time and of a device's peak (`Bounds`), and what the compiler says.

    - `peak`, `seconds`, `fits`: from the compiled program, see `Plan.seconds`; None: not compiled
    """

    candidate: Candidate
    bound_seconds: float
    bound_bytes: int
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


def standard_sizes(setup: Setup) -> dict[str, int]:
    """Return the sizes of the mesh, without axes of the run's own (`mesh.axes`)."""
    return {axis: size for axis, size in setup.layout.mesh.shape.items() if axis in vars(setup.config.mesh)}


def meshes(setup: Setup, replica: int) -> Iterator[dict[str, int]]:
    """Yield all meshes of as many devices with this number of replicas; with a pipeline, of at least two stages."""
    sizes = {**standard_sizes(setup), "replica": replica}
    others = prod(size for axis, size in setup.layout.mesh.shape.items() if axis not in sizes)
    devices = setup.layout.mesh.size // sizes["island"] // replica // others
    piped = setup.config.pipeline is not None
    for stage, context, model in product(_divisors(devices), repeat=3):
        if devices % (stage * context * model) == 0 and (stage > 1) == piped:
            own = (stage, context, devices // (stage * context * model), model)
            yield {**sizes, **dict(zip(MESH_AXES, own, strict=True))}


def setups(setup: Setup, tokens: int, left_out: Counter[str], replicas: Iterable[int] = ()) -> Iterator[Setup]:
    """Yield the setup on each mesh that the model and the batch divide, with one microbatch; count the others.

    - `replicas`: sizes of `mesh.replica` instead of the present one
    """
    devices = list(setup.layout.mesh.devices.flat)
    for sizes in (each for count in replicas or (setup.layout.replicas,) for each in meshes(setup, count)):
        config = replace(setup.config, mesh=replace(setup.config.mesh, **sizes))
        config = replace(config, batch=replace(config.batch, microbatches=1))
        if config.pipeline is not None and sizes.items() - setup.layout.mesh.shape.items():
            config = replace(config, pipeline=replace(config.pipeline, microbatches=None, repeats=1))
        try:
            yield set_up(config, tokens, make_mesh(config.mesh, devices))
        except UserError:
            left_out["meshes that do not divide the heads, rows, tokens or layers"] += 1


class Bound(NamedTuple):
    """Lower bounds of a step's time, and of a device's peak."""

    seconds: float
    bytes: int


class Bounds:
    """Lower bounds of steps, in what settings of a search differ.

    Time is that of products, or of the transfers of parameters if they take longer, at the peak of the chip and of its
    links inside a slice. A device holds its state, weights that are gathered once, and its share of what the backward
    pass needs. Of a pipeline idle stages do not count, nor what it keeps, which depends on its numbers.
    """

    def __init__(self, tokens: int, target: Target):
        self._tokens, self._target = tokens, target
        self._known: dict[str, tuple[float, float]] = {}  # by the policy of `remat`: FLOPs, and bytes of one microbatch
        self._states: dict[Mesh, int] = {}  # bytes of a device's state

    def of(self, setup: Setup) -> Bound:
        """Return the bounds for the configuration of a setup on its mesh; its methods may be those of another."""
        config, devices, chip = setup.config, setup.layout.mesh.size, self._target.chip
        remat, microbatches = (config.pipeline or config.compute).remat, config.batch.microbatches
        if remat not in self._known:
            whole = config if config.pipeline else replace(config, batch=replace(config.batch, microbatches=1))
            work = step_work(traced := set_up(whole, self._tokens, setup.layout.mesh))
            flops, schedule = work.flops - work.eight_bit_flops * (1 - 1 / EIGHT_BIT), traced.schedule()
            busy = (1 - schedule.bubble) * flops if schedule else flops
            self._known[remat] = busy, 0.0 if schedule else work.saved_bytes
        flops, saved = self._known[remat]
        compute, use = flops / devices / chip.flops_per_second, parameter_use(setup)
        seconds = self._target.devices_a_chip * max(compute, use.sent / chip.link_bytes_per_second)
        mesh = setup.layout.mesh
        if mesh not in self._states:
            self._states[mesh] = tree_bytes(setup).state
        return Bound(seconds, self._states[mesh] + use.held + int(saved / microbatches / devices))


def ranked_candidates(setup: Setup, bounds: Bounds, left_out: Counter[str]) -> list[RankedCandidate]:
    """Return all candidates on the mesh of a setup; `left_out` counts impossible ones by reason."""
    found, mesh, keys = [], _mesh(setup), keys_of(setup.config)
    for values in product(*(list(key.values(setup)) for key in keys)):
        candidate = Candidate((*mesh, *zip((key.name for key in keys), values, strict=True)))
        try:
            found.append(RankedCandidate(candidate, *bounds.of(changed_setup(setup, candidate))))
        except UserError as error:
            if setup.config.pipeline is None:  # numbers of a pipeline are combined without regard to one another
                left_out[str(error)] += 1
    return found


def changed_setup(setup: Setup, candidate: Candidate) -> Setup:
    """Return a setup with a candidate's settings, on the same mesh; raise `UserError` if they are impossible."""
    config = candidate.of(setup.config)
    execution(config.compute, setup.layout, config.model)
    check(config, setup.layout, LAYOUT)
    return replace(setup, config=config)


# Of devices, from one axis to another that splits more: rows, then sequences, then layers.
MOVES = (
    ("replica", "data"),
    ("data", "context"),
    ("replica", "context"),
    ("data", "model"),
    ("replica", "model"),
)
Change = tuple[dict[str, Any], TrainConfig]  # settings by key, and the configuration with them


def changes(setup: Setup, tokens: int, bounds: Bounds) -> list[list[Change]]:
    """Return single changes that may need less memory, a list for each kind, the cheapest by their bounds first.

    A key's other values have a bound that is not lower, and no transfers to the host. Devices move to an axis that
    splits more.
    """
    now, least, found = candidate_of(setup), bounds.of(setup).seconds, []
    for key in keys_of(setup.config):
        kind = []
        for value in key.values(setup):
            if value != now[key.name] and value not in TO_HOST:
                with suppress(UserError):
                    changed = changed_setup(setup, now.changed(key.name, value))
                    kind.append((bounds.of(changed).seconds, {key.name: value}, changed.config))
        found.append([each for each in kind if each[0] >= least])
    found.append(list(_on_meshes(setup, tokens, bounds)))
    return [[(keys, config) for _, keys, config in sorted(kind, key=lambda each: each[0])] for kind in found]


def _on_meshes(setup: Setup, tokens: int, bounds: Bounds) -> Iterator[tuple[float, dict[str, Any], TrainConfig]]:
    """Yield the possible meshes with devices moved from an axis to one that splits more."""
    sizes = standard_sizes(setup)
    for source, to in MOVES:
        factor = 2
        while factor <= sizes[source] and sizes[source] % factor == 0:
            moved = {source: sizes[source] // factor, to: sizes[to] * factor}
            config = replace(setup.config, mesh=replace(setup.config.mesh, **{**sizes, **moved}))
            with suppress(UserError):
                own = set_up(config, tokens, make_mesh(config.mesh, list(setup.layout.mesh.devices.flat)))
                yield bounds.of(own).seconds, {f"mesh.{axis}": size for axis, size in moved.items()}, config
            factor *= 2


def on_other_meshes(setup: Setup, tokens: int, bounds: Bounds) -> list[Change]:
    """Return for each mesh, and those with devices of `replica`, the settings with the smallest bound of the peak.

    They are with the most microbatches, in the order of their bounds of time. Nothing that is the setup's own.
    """
    now, own = candidate_of(setup), setup.layout.mesh.shape
    slices = len({slice_of(device) for device in setup.layout.mesh.devices.flat})
    replicas = [each for each in range(own["replica"], 0, -1) if own["replica"] % each == 0 and each % slices == 0]
    found = []
    for other in setups(setup, tokens, Counter(), replicas):
        every = ranked_candidates(other, bounds, Counter())
        least = min(every, key=lambda each: (each.bound_bytes, -each.candidate[MICROBATCHES]), default=None)
        if least is not None:
            sizes = {f"mesh.{axis}": size for axis, size in other.layout.mesh.shape.items() if size != own[axis]}
            changed = {key: value for key, value in least.candidate.settings if value != dict(now.settings).get(key)}
            found.append((least.bound_seconds, {**sizes, **changed}, least.candidate.of(other.config)))
    return [(keys, config) for _, keys, config in sorted(found, key=lambda each: each[0]) if keys]


def flags(settings: dict[str, Any]) -> str:
    """Return settings by key as options of a command, such as `--mesh.data 4 --mesh.model 2`."""
    return " ".join(f"--{key} {value}" for key, value in settings.items())
