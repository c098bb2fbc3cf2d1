"""Provides the settings that `plan --search` chooses, and their memory and time in closed form."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import yaml

from gregale.audit.estimate import is_compared
from gregale.axes.layout import make_mesh
from gregale.communication.pipeline import GATHER_LEVELS, SAVED
from gregale.communication.reduce import rows_per_part
from gregale.errors import UserError
from gregale.model.config import GATHER, REMAT
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.shapes import estimate, step_shape, tree_bytes
from gregale.programs.plan.step_seconds import closed_form_seconds
from gregale.programs.runtime.expert_parallelism import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.rules import check
from gregale.settings.rules import LAYOUT

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

    - `closed_form_peak`, `closed_form_seconds`: of a step, see `gregale.programs.plan.step_seconds`
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
