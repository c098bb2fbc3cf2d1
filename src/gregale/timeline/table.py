"""The bandwidth that each method needs for a compute utilisation, from a grid as in the paper."""

from collections.abc import Sequence

import numpy as np

from gregale.timeline.methods import METHODS, Cadence
from gregale.timeline.model import Ring, Workload
from gregale.timeline.simulate import Run, simulate

GRID_GBIT_PER_SECOND = np.logspace(-1, 3, 50)
UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)


def run_method(
    name: str,
    workload: Workload,
    ring: Ring,
    cadence: Cadence,
    gbit_per_second: np.ndarray = GRID_GBIT_PER_SECOND,
    codec: str | None = None,
) -> Run:
    """Simulate a method by name, with its own codec or another one.

    Raises:
        UserError: the schedule does not fit.
    """
    return run_schedule(name, workload, ring, cadence, METHODS[name].bytes_per_parameter(codec), gbit_per_second)


def run_schedule(
    name: str,
    workload: Workload,
    ring: Ring,
    cadence: Cadence,
    bytes_per_parameter: float,
    gbit_per_second: np.ndarray = GRID_GBIT_PER_SECOND,
) -> Run:
    """Simulate a method by name with a number of bytes per parameter on the wire, the mean of the two halves.

    Raises:
        UserError: the schedule does not fit.
    """
    transfers = METHODS[name].schedule(workload, cadence, bytes_per_parameter)
    return simulate(workload, transfers, ring, gbit_per_second, cadence.steps)


def needed_bandwidths(
    utilisation: np.ndarray, gbit_per_second: np.ndarray = GRID_GBIT_PER_SECOND, goals: Sequence[float] = UTILISATIONS
) -> list[float | None]:
    """Return, for each goal, the grid's first bandwidth that reaches this utilisation; None if none does."""
    # A run without waits reaches 1 only up to rounding.
    reached = [np.flatnonzero(utilisation >= goal - 1e-12) for goal in goals]
    return [float(gbit_per_second[at[0]]) if at.size else None for at in reached]
