"""The methods side by side, for the link between replicas: what each sends, and the link that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gregale.audit.roofline import Roofline
from gregale.audit.step import StepShape
from gregale.methods.config import DilocoConfig, StreamingDilocoConfig, SyncConfig
from gregale.methods.diloco import Diloco
from gregale.programs.plan.outer import Joining
from gregale.programs.plan.shapes import devices_of_a_replica, step_shape
from gregale.programs.run.setup import Setup, method_of
from gregale.timeline.fleet import Fleet
from gregale.timeline.methods import Cadence
from gregale.timeline.model import Workload
from gregale.timeline.table import needed_bandwidths, run_method

GOAL = 0.9
GBIT = 1e9 / 8
PAYLOAD = "float32"  # what `communication.reduce` sends


@dataclass(frozen=True)
class Compared:
    """A method as it is compared.

    - `sync`: its settings; None for PSDP
    - `configured`: whether they are the configuration's own
    """

    sync: DilocoConfig | None
    configured: bool


def compared(sync: SyncConfig, layers: int) -> dict[str, Compared]:
    """The methods by name. What the configuration does not name has its defaults, as far as they are possible.

    Its period, if it has one, is everybody's.
    """
    period = sync.period if isinstance(sync, DilocoConfig) else DilocoConfig().period
    default = StreamingDilocoConfig()
    fragments, delay = min(default.fragments, layers + 1, period), min(default.delay, period - 1)
    streaming = StreamingDilocoConfig(period=period, fragments=fragments, delay=delay)
    found = {
        "psdp": Compared(None, not isinstance(sync, DilocoConfig)),
        "diloco": Compared(DilocoConfig(period=period), False),
        "streaming": Compared(replace(streaming, delay=0), False),
        "streaming_overlap": Compared(streaming, False),
    }
    if isinstance(sync, StreamingDilocoConfig) and sync.delay:
        return found | {
            "streaming": Compared(replace(sync, delay=0), False),
            "streaming_overlap": Compared(sync, True),
        }
    if isinstance(sync, StreamingDilocoConfig):
        return found | {
            "streaming": Compared(sync, True),
            "streaming_overlap": Compared(replace(sync, delay=delay), False),
        }
    return found | {"diloco": Compared(sync, True)} if isinstance(sync, DilocoConfig) else found


def methods_of(setup: Setup, bound: Roofline, bytes_per_second: float | None) -> dict[str, dict[str, Any]]:
    """For each method its settings, what it sends over the slow axis, and the link that it needs.

    A step lasts as long as the roofline says without the link between replicas. Empty with one replica.

    - `bytes_per_step`: of a device, over the axis that the method joins; `average` over a period, `peak` of a step
    - `gbit_per_second`: the same of a whole replica, were it sent within as many steps
    - `needed_gbit_per_second`: for 90 percent utilisation, by the timeline's model, in which a replica is a site
    - `utilisation`: what it reaches at `bytes_per_second`, a replica's link to the others
    """
    sizes = setup.layout.mesh.shape
    sites = sizes["replica"] * sizes.get("island", 1)
    if sites < 2:
        return {}
    step, fleet, found = step_shape(setup), Fleet.uniform(sites), {}
    seconds = max(bound.compute, bound.memory, bound.links["inside slice"])
    gbit = devices_of_a_replica(setup) / seconds / GBIT
    for name, each in compared(setup.config.sync, step.layers).items():
        average, peak = bytes_a_step(setup, each.sync)
        found[name] = {
            **_settings(each, step.layers),
            "bytes_per_step": {"average": average, "peak": peak},
            "gbit_per_second": {"average": average * gbit, "peak": peak * gbit},
            **_on_the_timeline(name, each.sync, step, fleet, seconds, bytes_per_second),
        }
    return found


def bytes_a_step(setup: Setup, sync: DilocoConfig | None) -> tuple[float, float]:
    """What a device sends over the slow axis for the parameters, on average and in a step at most; None: PSDP."""
    method = method_of(replace(setup.config, sync=sync or DilocoConfig()), setup.psdp)
    assert isinstance(method, Diloco)
    joining = Joining(method, step_shape(setup))
    if sync is None:
        return joining.bytes_if_every_step(), joining.bytes_if_every_step()
    return joining.bytes_a_step()


def _settings(each: Compared, layers: int) -> dict[str, Any]:
    """H, P and tau, and whether they are the configuration's own; PSDP joins everything in every step."""
    if each.sync is None:
        return {"period": 1, "fragments": 1, "delay": 0, "configured": each.configured}
    schedule = each.sync.schedule(layers)
    return {
        "period": schedule.period,
        "fragments": schedule.fragments,
        "delay": schedule.delay,
        "configured": each.configured,
    }


def _on_the_timeline(
    name: str, sync: DilocoConfig | None, step: StepShape, fleet: Fleet, seconds: float, bytes_per_second: float | None
) -> dict[str, float | None]:
    """The link that a method needs, and what it reaches at the given one."""
    schedule = (sync or DilocoConfig()).schedule(step.layers)
    workload = Workload(step.parameters, step.layers, seconds, step.microbatches)
    cadence = cadence_of(schedule.period, max(1, schedule.fragments - 1), max(1, schedule.delay), step.layers)
    on_grid = run_method(name, workload, fleet, cadence, codec=PAYLOAD)
    found = {"needed_gbit_per_second": needed_bandwidths(on_grid.utilisation, goals=(GOAL,))[0]}
    if bytes_per_second is not None:
        here = run_method(name, workload, fleet, cadence, np.array([bytes_per_second / GBIT]), PAYLOAD)
        found["utilisation"] = float(here.utilisation[0])
    return found


def cadence_of(period: int, groups: int, delay: int, layers: int) -> Cadence:
    """The timeline's cadence for so many groups of layers, over whole periods."""
    fragment_layers = -(-layers // groups)
    period = max(period, delay + 1, -(-layers // fragment_layers) + 1)
    periods = -(-Cadence().steps // period)
    return Cadence(periods * period, period, fragment_layers, delay)
