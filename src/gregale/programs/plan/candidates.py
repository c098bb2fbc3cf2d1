"""Provides the ways to compute a step on one mesh, with memory and time in closed form."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import yaml

from gregale.audit.device_axes import BETWEEN, INSIDE
from gregale.audit.roofline import roofline
from gregale.communication.accumulate import rows_per_part
from gregale.errors import UserError
from gregale.model.config import GATHER, REMAT
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.shapes import estimate, estimated_link_bytes, estimated_work
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig


@dataclass(frozen=True)
class Candidate:
    """Settings that a search chooses.

    - `remat`, `unroll`, `gather`: keys of `compute`
    - `microbatches`: key of `batch`
    """

    remat: str
    microbatches: int
    unroll: int
    gather: str

    def of(self, config: TrainConfig) -> TrainConfig:
        compute = replace(config.compute, remat=self.remat, unroll=self.unroll, gather=self.gather)
        return replace(config, compute=compute, batch=replace(config.batch, microbatches=self.microbatches))

    def yaml(self) -> str:
        compute = {"remat": self.remat, "gather": self.gather, "unroll": self.unroll}
        return yaml.safe_dump({"batch": {"microbatches": self.microbatches}, "compute": compute}, sort_keys=False)

    def __str__(self) -> str:
        return f"remat {self.remat}, microbatches {self.microbatches}, unroll {self.unroll}, gather {self.gather}"


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate with its estimates.

    - `closed_form_peak`, `closed_form_seconds`: of a step without overlap
    - `peak`, `seconds`, `fits`: from the compiled program, see `scheduled_seconds`; None: not compiled
    """

    candidate: Candidate
    closed_form_peak: int
    closed_form_seconds: float
    peak: int | None = None
    seconds: float | None = None
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        estimates = {key: value for key, value in vars(self).items() if key != "candidate"}
        return {**asdict(self.candidate), **estimates}


def scored_candidates(
    setup: Setup, target: Target, unroll: int, bandwidth: float | None, gathers: tuple[str, ...] = GATHER
) -> tuple[list[ScoredCandidate], list[str]]:
    """Return all candidates with `unroll` layers in closed form, the fastest first, and why some are impossible.

    - `bandwidth`: bytes per second that a device sends between slices; None: the chip's share of its network
    - `gathers`: the values of `compute.gather` to score
    """
    found, left_out = [], {}
    rows = rows_per_part(setup.config.batch.size, setup.layout, 1)
    for remat, gather in product(REMAT, gathers):
        for microbatches in (count for count in range(1, rows + 1) if rows % count == 0):
            candidate = Candidate(remat, microbatches, unroll, gather)
            changed = replace(setup, config=candidate.of(setup.config))
            try:
                execution(changed.config.compute, setup.layout, setup.config.model)
            except UserError as error:
                left_out[str(error)] = None
                continue
            peak = estimate(changed, target.backend).peak
            found.append(ScoredCandidate(candidate, peak, closed_form_seconds(changed, target, bandwidth)))
    return sorted(found, key=lambda each: each.closed_form_seconds), [*left_out]


def closed_form_seconds(setup: Setup, target: Target, bandwidth: float | None) -> float:
    work = estimated_work(setup, estimated_link_bytes(setup) or {INSIDE: 0.0, BETWEEN: 0.0})
    return roofline(work, target.chip, target.devices_a_chip, bandwidth).one_after_another
