"""Provides the report of `gregale plan` as data for JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from gregale.axes.layout import EXPERTS, mapping_rows
from gregale.axes.parameters import layer_order, parameter_count, trainable
from gregale.cost.chips import GBIT
from gregale.cost.overlap import DENSE, MIXTURE, Schedule
from gregale.cost.roofline import Roofline
from gregale.methods.config import compared
from gregale.methods.diloco import sync_axis
from gregale.methods.schedule import Schedule as MethodSchedule
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.estimates import base_note, devices_of_a_replica, optimizer_note, tree_bytes, weights_of
from gregale.programs.plan.step import MEMORY, STEP, Plan, Program
from gregale.programs.runtime.build import choice_of, in_places
from gregale.programs.runtime.setup import Setup, parameter_groups
from gregale.runs.sections import JoiningCosts, section_classes
from gregale.timeline import GRID_GBIT_PER_SECOND, Cadence, Ring, Workload, needed_bandwidths, run_method


def report_of(
    plan: Plan, tokens: int, link_gbit_per_second: float | None, joining: JoiningCosts | None = None
) -> dict[str, Any]:
    """Return the full report for JSON, with no remedies yet.

    - `link_gbit_per_second`: the link of a replica, or of a run's host, to the others; None: the chips' network
    - `joining`: the costs of joining the run with others; None if it is alone
    """
    setup, target = plan.setup, plan.target
    config = setup.config
    far = link_bytes_per_second(target, setup, link_gbit_per_second)
    bandwidth = None if far is None else far / devices_of_a_replica(setup)
    bound = plan.roofline(bandwidth)
    memory = memory_of(plan, joining)
    programs = {name: program_of(plan, program, bandwidth) for name, program in plan.programs.items()}
    return {
        "name": config.name,
        "devices": setup.layout.mesh.size,
        "device_kind": "simulated CPU" if target.simulated else target.devices[0].device_kind,
        "mesh": {axis: size for axis, size in setup.layout.mesh.shape.items() if size > 1},
        "mapping": [list(row) for row in mapping_rows(setup.layout)],
        "chip": target.chip.name,
        "until": plan.until,
        "kernels": kernels_of(setup),
        "experts": experts_of(setup, tokens),
        "parameter_groups": parameter_groups(setup),
        "compiler_options": setup.compiler_options or {},
        "pipeline": pipeline_of(setup),
        "sync": config.sync.get_choice_name(type(config.sync)),
        "parameters": parameter_count(setup.model),
        "frozen_parameters": parameter_count(setup.base) if setup.frozen is not None else 0,
        "active_parameters": active_parameters(setup),
        "tokens_per_step": config.batch.tokens,
        "flops_per_token": plan.model.visible,
        "flops_per_token_full_attention": plan.model.full,
        "flops_per_step": plan.model.visible * config.batch.tokens,
        "compiler_flops_per_device": plan.step.flops,
        "memory": memory,
        "fits": memory["peak"] <= memory["chip"],
        "remedies": [],
        **{key: value for key, value in programs[STEP].items() if key not in ("peak", "refused")},
        "programs": programs,
        "roofline": {**bound_to_dict(bound), "sent_bytes": plan.link_bytes},
        "link_gbit_per_second": None if far is None else far / GBIT,
        "methods": {} if joining else methods_of(setup, bound, far),
        **dict.fromkeys(each.costs_key for each in section_classes().values()),
        **({config.fleet.costs_key: joining.to_dict(bound, link_gbit_per_second)} if joining else {}),
        "notes": notes_of(plan, programs),
    }


def joining_costs(setup: Setup, count: int | None) -> JoiningCosts | None:
    """Return the costs of joining a run with others; None if it is alone. `count`: runs; None: as configured."""
    return setup.config.fleet.costs(setup.method, count)


def bound_to_dict(bound: Roofline) -> dict[str, Any]:
    return {
        "compute_seconds": bound.compute,
        "memory_seconds": bound.memory,
        "link_seconds": dict(bound.links),
        "host_seconds": bound.host,
        "step_seconds_overlapped": bound.overlapped,
        "step_seconds_one_after_another": bound.one_after_another,
        **bound.utilisation(bound.overlapped),
    }


def kernels_of(setup: Setup) -> dict[str, str]:
    """Return the variants of the model's operations: differentiation rules, and for models with heads attention."""
    model = setup.config.model
    kernels = execution(setup.config.compute, setup.layout, model).kernels
    return {"rules": kernels.rules} | ({"attention": kernels.attention} if model.head_width else {})


def experts_of(setup: Setup, tokens: int) -> dict[str, Any] | None:
    """Return the place of experts, and the bytes of a step with each place; None without experts."""
    if setup.config.model.experts is None:
        return None
    place = "exchanged" if setup.layout.mesh_axes((EXPERTS,), setup.layout.compute) else "gathered"
    choice = asdict(choice_of(*in_places(setup.config, tokens, setup.layout.mesh)))
    return {"place": place, "auto": setup.config.mapping.leaves_experts_open, **choice}


def pipeline_of(setup: Setup) -> dict[str, Any] | None:
    """Return the pipeline's schedule: its numbers, the share of idle iterations, and a picture; None without one."""
    schedule = setup.schedule()
    if schedule is None:
        return None
    computed = {"iterations": schedule.iterations, "bubble": schedule.bubble, "picture": schedule.picture()}
    return {**asdict(schedule), **computed}


def link_bytes_per_second(target: Target, setup: Setup, link_gbit_per_second: float | None) -> float | None:
    """Return a replica's rate to the others in bytes per second: as given, or its chips' share of the network."""
    if link_gbit_per_second is not None:
        return link_gbit_per_second * GBIT
    network = target.chip.network_bytes_per_second
    return None if network is None else network / target.devices_a_chip * devices_of_a_replica(setup)


def memory_of(plan: Plan, joining: JoiningCosts | None) -> dict[str, Any]:
    """Return bytes on one device by tree, and at the peak of the largest program.

    `activations` are the step's temporaries without the gradient buffers. Joining other runs adds `in_flight` to each
    program.
    """
    temporaries, trees = plan.step.memory.temporaries, asdict(tree_bytes(plan.setup))
    in_flight = 0 if joining is None else joining.device_bytes_in_flight()
    shortage = plan.programs[plan.largest].shortage
    return {
        **trees,
        "activations": max(0, temporaries - trees["gradients"]),
        "temporaries": temporaries,
        "in_flight": in_flight,
        "peak": plan.memory.peak + in_flight,
        "peak_program": plan.largest,
        "chip": plan.memory_bytes,
        "largest": [{"bytes": size, "shapes": shapes} for size, shapes in shortage.largest] if shortage else [],
    }


def active_parameters(setup: Setup) -> int:
    """Return the number of parameters that a token passes: of the experts only its own."""
    experts, found = setup.config.model.experts, 0
    for weight in [*weights_of(setup.base), *weights_of(setup.config.adapter and trainable(setup.model))]:
        is_of_experts = experts is not None and EXPERTS in weight.axis_names
        share = experts.active / weight.resolve_axis(EXPERTS).size if experts and is_of_experts else 1
        found += round(share * weight.size)
    return found


def program_of(plan: Plan, program: Program, bandwidth: float | None) -> dict[str, Any]:
    """Return a program's peak, its collectives, their bytes, its time and its overlap.

    - `bandwidth`: bytes per second that a device sends between slices; None: unknown
    """
    schedule = plan.schedule(program, bandwidth)
    return {
        "peak": program.memory.peak,
        "refused": program.shortage is not None,
        "compiler_flops_per_device": program.flops,
        **program.audit.to_dict(),
        "estimate": None if schedule is None else estimate_of(plan, schedule, bandwidth),
        "overlap": overlap_of(program, schedule),
    }


def estimate_of(plan: Plan, schedule: Schedule, bandwidth: float | None) -> dict[str, Any]:
    """Return the seconds of one run of a program, from below and calibrated, and the utilisation as if it were a step.

    `unlisted_kernels` count at the chip's peak, because the table of kernels lacks them.
    """
    seconds, utilisation = schedule.seconds, plan.roofline(bandwidth).utilisation
    factor = DENSE if plan.setup.config.model.experts is None else MIXTURE
    range_seconds = [factor.least * seconds, factor.most * seconds]
    return {
        "seconds": seconds,
        "compute_seconds": schedule.compute,
        "kernel_seconds": schedule.kernels,
        "exposed_seconds": schedule.exposed,
        **utilisation(seconds),
        "unlisted_kernels": sorted(schedule.unlisted),
        "calibrated": {
            "seconds": factor.mean * seconds,
            "range_seconds": range_seconds,
            **utilisation(factor.mean * seconds),
        },
    }


def overlap_of(program: Program, schedule: Schedule | None) -> dict[str, dict[str, float | None]]:
    """Return by link the payload bytes of a run, the asynchronous ones among them, and hidden and exposed seconds.

    Seconds are None if the compiler estimates no cycles, or the link has no rate. Copies to the host's memory and from
    it have seconds alone.
    """
    found: dict[str, dict[str, float | None]] = {}
    timed = {} if schedule is None else schedule.links
    for link in dict.fromkeys(each.link for each in program.audit.collectives):
        here = [each for each in program.audit.collectives if each.link == link]
        times = timed.get(link)
        found[link] = {
            "bytes": sum(each.bytes * each.counted for each in here),
            "asynchronous": sum(each.bytes * each.counted for each in here if each.is_async),
            "seconds": None if times is None else times.seconds,
            "hidden_seconds": None if times is None else times.hidden,
            "exposed_seconds": None if times is None else times.exposed,
        }
    for link in sorted(timed.keys() - found.keys()):
        seconds = {"seconds": timed[link].seconds, "hidden_seconds": timed[link].hidden}
        found[link] = {"bytes": None, "asynchronous": None, **seconds, "exposed_seconds": timed[link].exposed}
    return found


def notes_of(plan: Plan, programs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the notes that a reader needs to interpret the estimates."""
    notes, traffic = [], plan.setup.method.traffic()
    if unknown := sorted({name for each in plan.programs.values() for name in each.work.unknown}):
        notes.append(
            f"the FLOPs of {', '.join(unknown)} are not known: a kernel without `cost_estimate` counts none, and a "
            "loop that stops by a computed condition counts once."
        )
    if (note := base_note(plan.setup)) is not None:
        notes.append(note)
    if traffic is None:
        kind = plan.setup.config.sync.get_choice_name(type(plan.setup.config.sync))
        runs = ", ".join(f"{name} in {program.share:.1%} of them" for name, program in plan.programs.items())
        notes.append(
            f"sync.type is {kind}, whose method does not tell its traffic. The compiled programs of its first steps "
            f"have it: {runs}."
        )
    if (note := optimizer_note(plan.setup)) is not None:
        notes.append(note)
    if plan.target.simulated:
        notes.append(
            "compiled by XLA:CPU for simulated devices; traffic over `replica` counts as between slices. --topology "
            "uses the TPU compiler."
        )
        if plan.setup.config.compute.dtype != "float32":
            notes.append("XLA:CPU widens bfloat16: it holds and sends 4 bytes where an accelerator has 2.")
    if plan.target.devices[0].platform == "gpu":
        notes.append(
            "compiled for GPUs without a GPU: products and kernels are not tuned, the peak excludes the memory of "
            f"cuDNN and NCCL, and there are no times. JAX uses {plan.target.share:.0%} of the memory."
        )
    if len(plan.programs) > 1 and traffic is not None:
        notes.append(
            f"replicas join over {traffic.period} steps; if fragments differ in size, the programs are those of the "
            "largest. The roofline spreads their traffic over those steps."
        )
    if plan.setup.config.pipeline is not None:
        notes.append("idle stages of a pipeline also compute, and the roofline includes that.")
    if note := plan.setup.config.fleet.costs_note:
        notes.append(note)
    if plan.until == MEMORY and plan.target.topology is not None:
        notes.append(
            "compiled to the memory report: the peak excludes the program's code, some tens of MiB, and the report "
            "has no overlap. --until code adds both."
        )
    if any(program.shortage is not None for program in plan.programs.values()):
        notes.append(
            "the compiler rejects a program that does not fit; its report is from its schedule, before code generation."
        )
    estimates = [each["estimate"] for each in programs.values() if each["estimate"]]
    if unlisted := sorted({name for each in estimates for name in each["unlisted_kernels"]}):
        notes.append(
            f"the table of kernels lacks {', '.join(unlisted)} for this chip: they count as the products of their "
            "visible blocks at the chip's peak. benchmarks/kernel_cycles.py adds them."
        )
    collectives = [each for program in plan.programs.values() for each in program.audit.collectives]
    unknown = sum(len(program.audit.unknown()) for program in plan.programs.values())
    if unknown:
        notes.append(f"{unknown} collectives have device groups that are no grid in the mesh.")
    if any(collective.times is None for collective in collectives):
        notes.append("a loop does not tell how often it runs; its collectives are counted once.")
    return notes


GOAL = 0.9


def methods_of(setup: Setup, bound: Roofline, bytes_per_second: float | None) -> dict[str, dict[str, Any]]:
    """Return for each method its settings, its traffic over the slow axis, and the bandwidth that it needs.

    The step time is the roofline's without the link between replicas. The result is empty with one replica.

    - `bytes_per_step`: of a device, over the axis that the method joins; `average` over a period, `peak` of a step
    - `gbit_per_second`: the rate at which a whole replica sends these bytes in the same number of steps
    - `needed_gbit_per_second`: for 90 percent utilisation in the timeline's model, in which a replica is a site
    - `utilisation`: the utilisation at `bytes_per_second`, a replica's link to the others
    - `curve`: the same, `utilisation` at each `gbit_per_second`
    """
    sizes = setup.layout.mesh.shape
    sites = sizes["replica"] * sizes.get("island", 1)
    if sites < 2:
        return {}
    layers, ring, found = max(1, len(layer_order(setup.model))), Ring(sites), {}
    seconds = max(bound.compute, bound.memory, bound.links["inside slice"])
    gbit = devices_of_a_replica(setup) / seconds / GBIT
    workload = Workload(parameter_count(setup.model), layers, seconds, setup.config.batch.microbatches)
    members = setup.layout.axis(sync_axis(setup.layout)).size

    def run(name: str, schedule: MethodSchedule, bytes_each: float) -> Callable[[np.ndarray], np.ndarray]:
        """Return the utilisation on the timeline as a function of Gbit/s, with the configured codecs' bytes."""
        cadence = cadence_of(schedule.period, max(1, schedule.fragments - 1), max(1, schedule.delay), layers)
        return lambda grid: run_method(name, workload, ring, cadence, grid, bytes_each).utilisation

    for name, each in compared(setup.config.sync, layers, setup.config.adapter is not None).items():
        traffic, schedule = each.traffic(setup.method_context), each.schedule(layers)
        bytes_each = each.reduce(setup.config.reduce).bytes_per_parameter(members)
        found[name] = {
            **{key: getattr(schedule, key) for key in ("period", "fragments", "delay")},
            "configured": each.configured,
            "bytes_per_step": {"average": traffic.average, "peak": traffic.most},
            "gbit_per_second": {"average": traffic.average * gbit, "peak": traffic.most * gbit},
            **_on_the_timeline(run(name, schedule, bytes_each), bytes_per_second),
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
