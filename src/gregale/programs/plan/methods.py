"""Provides a comparison of methods: the bytes that each sends between replicas, and the bandwidth that it needs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gregale.audit.chips import GBIT
from gregale.audit.roofline import Roofline
from gregale.methods.comparison import compared
from gregale.methods.schedule import Schedule
from gregale.programs.plan.shapes import devices_of_a_replica, step_shape
from gregale.programs.runtime.setup import Setup
from gregale.timeline import GRID_GBIT_PER_SECOND, Cadence, Ring, Workload, needed_bandwidths, run_method

GOAL = 0.9


def methods_of(setup: Setup, bound: Roofline | None, bytes_per_second: float | None) -> dict[str, dict[str, Any]]:
    """Return for each method its settings, its traffic over the slow axis, and the bandwidth that it needs.

    The step time is the roofline's without the link between replicas. The result is empty with one replica, and
    without a roofline.

    - `bytes_per_step`: of a device, over the axis that the method joins; `average` over a period, `peak` of a step
    - `gbit_per_second`: the rate at which a whole replica sends these bytes in the same number of steps
    - `needed_gbit_per_second`: for 90 percent utilisation in the timeline's model, in which a replica is a site
    - `utilisation`: the utilisation at `bytes_per_second`, a replica's link to the others
    - `curve`: the same, `utilisation` at each `gbit_per_second`
    """
    sizes = setup.layout.mesh.shape
    sites = sizes["replica"] * sizes.get("island", 1)
    if sites < 2 or bound is None:
        return {}
    step, ring, found = step_shape(setup), Ring(sites), {}
    seconds = max(bound.compute, bound.memory, bound.links["inside slice"])
    gbit = devices_of_a_replica(setup) / seconds / GBIT
    workload, wire = Workload(step.parameters, step.layers, seconds, step.microbatches), setup.config.reduce

    def run(name: str, schedule: Schedule) -> Callable[[np.ndarray], np.ndarray]:
        """Return the utilisation on the timeline as a function of Gbit/s, with the configured codecs' bytes."""
        cadence = cadence_of(schedule.period, max(1, schedule.fragments - 1), max(1, schedule.delay), step.layers)
        return lambda grid: run_method(name, workload, ring, cadence, grid, wire.bytes_per_parameter).utilisation

    for name, each in compared(setup.config.sync, step.layers, step.adapts).items():
        average, peak = each.bytes_a_step(setup.parts, step)
        schedule = each.schedule(step.layers)
        found[name] = {
            **{key: getattr(schedule, key) for key in ("period", "fragments", "delay")},
            "configured": each.configured,
            "bytes_per_step": {"average": average, "peak": peak},
            "gbit_per_second": {"average": average * gbit, "peak": peak * gbit},
            **_on_the_timeline(run(name, schedule), bytes_per_second),
        }
    return found


def _on_the_timeline(utilisation: Callable[[np.ndarray], np.ndarray], bytes_per_second: float | None) -> dict[str, Any]:
    """Return the bandwidth that a method needs, and its utilisation at the given link and on a grid of links."""
    reached = utilisation(GRID_GBIT_PER_SECOND)
    curve = {"gbit_per_second": _short(GRID_GBIT_PER_SECOND), "utilisation": _short(reached)}
    found: dict[str, Any] = {"needed_gbit_per_second": needed_bandwidths(reached, goals=(GOAL,))[0], "curve": curve}
    if bytes_per_second is not None:
        found["utilisation"] = float(utilisation(np.array([bytes_per_second / GBIT]))[0])
    return found


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def cadence_of(period: int, groups: int, delay: int, layers: int) -> Cadence:
    """Return the timeline's cadence for `groups` groups of layers, over whole periods."""
    fragment_layers = -(-layers // groups)
    period = max(period, delay + 1, -(-layers // fragment_layers) + 1)
    periods = -(-Cadence().steps // period)
    return Cadence(periods * period, period, fragment_layers, delay)
