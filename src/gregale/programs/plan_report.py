"""What `gregale plan` says, as data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from gregale.audit.report import Audit
from gregale.audit.roofline import Roofline, model_flops_per_token
from gregale.audit.step import ACCELERATOR
from gregale.audit.traffic import bytes_by_axes, expected_transfers
from gregale.methods.config import DilocoConfig
from gregale.programs.plan_remedies import remedies
from gregale.programs.plan_step import Plan, devices_of_a_replica, estimate, step_shape, tree_bytes
from gregale.timeline.fleet import Fleet
from gregale.timeline.methods import Cadence
from gregale.timeline.model import Workload
from gregale.timeline.table import needed_bandwidths, run_method

METHODS = ("psdp", "diloco", "streaming", "streaming_overlap")
GOAL = 0.9
GBIT = 1e9 / 8


def report_of(plan: Plan, tokens: int, link_gbit_per_second: float | None) -> dict[str, Any]:
    """Everything, for JSON; `link_gbit_per_second` is one replica's link to the others, None for the chips' own."""
    setup, target = plan.setup, plan.target
    step, config = step_shape(setup), setup.config
    per_token = model_flops_per_token(step)
    far = link_bytes_per_second(plan, link_gbit_per_second)
    bound = plan.roofline(None if far is None else far / devices_of_a_replica(setup))
    memory = memory_of(plan)
    return {
        "name": config.name,
        "devices": setup.layout.mesh.size,
        "device_kind": "simulated CPU" if target.simulated else target.devices[0].device_kind,
        "mesh": {axis: size for axis, size in setup.layout.mesh.shape.items() if size > 1},
        "chip": target.chip.name,
        "sync": config.sync.get_choice_name(type(config.sync)),
        "parameters": step.parameters,
        "tokens_per_step": config.batch.tokens,
        "flops_per_token": per_token,
        "flops_per_step": per_token * config.batch.tokens,
        "compiler_flops_per_device": plan.compiler_flops,
        "memory": memory,
        "fits": memory["peak"] <= memory["chip"],
        "remedies": [] if memory["peak"] <= memory["chip"] else [asdict(each) for each in remedies(plan, tokens)],
        **plan.audit.to_dict(),
        "closed_form_bytes_per_step": closed_form_bytes(plan),
        "overlap": overlap_of(plan),
        "roofline": roofline_of(plan, bound),
        "link_gbit_per_second": None if far is None else far / GBIT,
        "methods": methods_of(plan, bound, far),
        "notes": notes_of(plan, plan.audit),
    }


def link_bytes_per_second(plan: Plan, link_gbit_per_second: float | None) -> float | None:
    """What one replica sends to the others, in bytes per second: as given, or all its chips' share of the network."""
    if link_gbit_per_second is not None:
        return link_gbit_per_second * GBIT
    network = plan.target.chip.network_bytes_per_second
    if network is None:
        return None
    return network / plan.target.devices_a_chip * devices_of_a_replica(plan.setup)


def memory_of(plan: Plan) -> dict[str, int]:
    """Bytes on one device, by tree. `activations` are the compiler's temporaries less the gradient buffers."""
    trees, compiler = tree_bytes(plan.setup), plan.memory
    return {
        "parameters": trees.parameters,
        "optimizer": trees.optimizer,
        "gradients": trees.gradients,
        "batch": trees.batch,
        "activations": max(0, compiler.temporaries - trees.gradients),
        "temporaries": compiler.temporaries,
        "peak": compiler.peak,
        "closed_form": estimate(plan.setup, plan.target.backend).peak,
        "closed_form_on_accelerator": estimate(plan.setup, ACCELERATOR).peak,
        "chip": plan.target.memory_bytes,
    }


def closed_form_bytes(plan: Plan) -> dict[str, int] | None:
    """Bytes of a PSDP step by mesh axes, as the audit counts them; None for other methods."""
    if isinstance(plan.setup.config.sync, DilocoConfig):
        return None
    sums = bytes_by_axes(expected_transfers(step_shape(plan.setup), plan.target.backend))
    return {",".join(axes): size for axes, size in sums.items()}


def overlap_of(plan: Plan) -> dict[str, dict[str, float]]:
    """By link: payload bytes of a step, those started apart from their end, and those with compute meanwhile."""
    found: dict[str, dict[str, float]] = {}
    for collective in plan.audit.collectives:
        sums = found.setdefault(collective.link, {"bytes": 0, "asynchronous": 0, "behind_compute": 0})
        size = collective.bytes * (collective.times or 1)
        sums["bytes"] += size
        sums["asynchronous"] += size if collective.is_async else 0
        sums["behind_compute"] += size if plan.hidden(collective) else 0
    return found


def roofline_of(plan: Plan, bound: Roofline) -> dict[str, Any]:
    return {
        "compute_seconds": bound.compute,
        "memory_seconds": bound.memory,
        "link_seconds": dict(bound.links),
        "step_seconds_overlapped": bound.overlapped,
        "step_seconds_one_after_another": bound.one_after_another,
        "mfu_bound": bound.mfu_bound,
        "sent_bytes": plan.link_bytes,
    }


def methods_of(plan: Plan, bound: Roofline, bytes_per_second: float | None) -> dict[str, dict[str, float | None]]:
    """For each method the link that it needs for 90 percent utilisation, and what it reaches on the given one.

    From the timeline model: a replica is a site, and a step computes for as long as the roofline says without the link
    between replicas. Empty with one replica.
    """
    sizes = plan.setup.layout.mesh.shape
    sites = sizes["replica"] * sizes.get("island", 1)
    if sites < 2:
        return {}
    step = step_shape(plan.setup)
    seconds = max(bound.compute, bound.memory, bound.links["inside slice"])
    workload = Workload(step.parameters, step.layers, seconds, step.microbatches)
    fleet = Fleet.uniform(sites)
    fragments = -(-step.layers // Cadence().fragment_layers)
    cadence = Cadence(period_steps=max(Cadence().period_steps, fragments + 1))
    found = {}
    for name in METHODS:
        on_grid = run_method(name, workload, fleet, cadence)
        found[name] = {"needed_gbit_per_second": needed_bandwidths(on_grid.utilisation, goals=(GOAL,))[0]}
        if bytes_per_second is not None:
            here = run_method(name, workload, fleet, cadence, np.array([bytes_per_second / GBIT]))
            found[name]["utilisation"] = float(here.utilisation[0])
    return found


def notes_of(plan: Plan, audit: Audit) -> list[str]:
    """What a reader must know to read the figures rightly."""
    notes = []
    if plan.target.simulated:
        notes.append(
            "compiled by XLA:CPU for simulated devices; what crosses `replica` is taken to be between slices, and "
            "the compiler's peak holds all attention scores. --topology asks the TPU compiler."
        )
        if step_shape(plan.setup).compute_bytes < plan.target.backend.narrowest_bytes:
            notes.append("XLA:CPU widens bfloat16: it holds and sends 4 bytes where an accelerator has 2.")
    sync = plan.setup.config.sync
    if isinstance(sync, DilocoConfig):
        notes.append(
            f"the program is that of step 1; replicas synchronise over {sync.period} steps, in programs that are not "
            "listed. The roofline spreads what they send over those steps."
        )
    unknown = len(audit.unknown())
    if unknown:
        notes.append(f"{unknown} collectives are among groups of devices that are no grid in the mesh.")
    if any(collective.times is None for collective in audit.collectives):
        notes.append("a loop does not tell how often it runs; its collectives are counted once.")
    return notes
