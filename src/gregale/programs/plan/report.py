"""What `gregale plan` says, as data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gregale.audit.overlap import Schedule
from gregale.audit.roofline import Roofline, model_flops_per_token
from gregale.audit.step import ACCELERATOR, Backend
from gregale.audit.traffic import bytes_by_axes
from gregale.methods.island import Island
from gregale.model.execution import execution
from gregale.programs.plan.devices import Target
from gregale.programs.plan.island import IslandPlan
from gregale.programs.plan.methods import GBIT, methods_of
from gregale.programs.plan.programs import Program
from gregale.programs.plan.remedies import remedies
from gregale.programs.plan.shapes import devices_of_a_replica, estimate, estimated_work, step_shape, tree_bytes
from gregale.programs.plan.step import MEMORY, Plan
from gregale.programs.runtime.setup import Setup


def report_of(
    plan: Plan, tokens: int, link_gbit_per_second: float | None, island: IslandPlan | None = None
) -> dict[str, Any]:
    """Everything, for JSON.

    - `link_gbit_per_second`: one replica's link to the others, of an island one host's; None: the chips' own
    - `island`: None if the run is no island
    """
    setup, target = plan.setup, plan.target
    step, config = step_shape(setup), setup.config
    per_token = model_flops_per_token(step)
    far = link_bytes_per_second(target, setup, link_gbit_per_second)
    bandwidth = None if far is None else far / devices_of_a_replica(setup)
    bound = plan.roofline(bandwidth)
    memory = memory_of(plan, island)
    return {
        "name": config.name,
        "devices": setup.layout.mesh.size,
        "device_kind": "simulated CPU" if target.simulated else target.devices[0].device_kind,
        "mesh": {axis: size for axis, size in setup.layout.mesh.shape.items() if size > 1},
        "chip": target.chip.name,
        "until": plan.until,
        "kernels": kernels_of(setup),
        "compiler_options": setup.compiler_options or {},
        "pipeline": pipeline_of(setup),
        "sync": config.sync.get_choice_name(type(config.sync)),
        "parameters": step.parameters,
        "tokens_per_step": config.batch.tokens,
        "flops_per_token": per_token,
        "flops_per_step": per_token * config.batch.tokens,
        "compiler_flops_per_device": plan.step.flops,
        "memory": memory,
        "fits": memory["peak"] <= memory["chip"],
        "remedies": [] if memory["peak"] <= memory["chip"] else [each.to_dict() for each in remedies(plan, tokens)],
        **traffic_of(plan, plan.step, bandwidth),
        "programs": {name: program_of(plan, program, bandwidth) for name, program in plan.programs.items()},
        "roofline": roofline_of(plan, bound),
        "link_gbit_per_second": None if far is None else far / GBIT,
        "methods": {} if island else methods_of(setup, bound, far),
        "island": island.to_dict(bound, link_gbit_per_second) if island else None,
        "notes": notes_of(plan),
    }


def kernels_of(setup: Setup) -> dict[str, str]:
    """The form of the model's operations: whose rules of differentiation, which attention, what an embedding sends."""
    kernels = execution(setup.config.compute, setup.layout, setup.config.model).kernels
    embedding = "rows" if step_shape(setup).exchanges_rows else "table"
    return {"rules": kernels.rules, "attention": kernels.attention, "embedding": embedding}


def pipeline_of(setup: Setup) -> dict[str, Any] | None:
    """The pipeline's schedule: its numbers, the share of idle iterations, and a picture; None: there is none."""
    schedule = setup.schedule()
    if schedule is None:
        return None
    computed = {"iterations": schedule.iterations, "bubble": schedule.bubble, "picture": schedule.picture()}
    return {**asdict(schedule), **computed}


def link_bytes_per_second(target: Target, setup: Setup, link_gbit_per_second: float | None) -> float | None:
    """What one replica sends to the others, in bytes per second: as given, or all its chips' share of the network."""
    if link_gbit_per_second is not None:
        return link_gbit_per_second * GBIT
    network = target.chip.network_bytes_per_second
    return None if network is None else network / target.devices_a_chip * devices_of_a_replica(setup)


def memory_of(plan: Plan, island: IslandPlan | None) -> dict[str, Any]:
    """Bytes on one device: by tree, and at the peak of the largest program.

    `activations` are the step's temporaries less the gradient buffers; of an island `in_flight` is beside every
    program.
    """
    temporaries, trees = plan.step.memory.temporaries, asdict(tree_bytes(plan.setup))
    in_flight = 0 if island is None else island.traffic.device_bytes_in_flight()
    return {
        **trees,
        "activations": max(0, temporaries - trees["gradients"]),
        "temporaries": temporaries,
        "in_flight": in_flight,
        "peak": plan.memory.peak + in_flight,
        "peak_program": plan.largest,
        "closed_form": estimated_peak(plan.setup, plan.target.backend),
        "closed_form_on_accelerator": estimated_peak(plan.setup, ACCELERATOR),
        "chip": plan.memory_bytes,
        "largest": [{"bytes": size, "shapes": shapes} for size, shapes in largest_of(plan)],
    }


def largest_of(plan: Plan) -> list[tuple[int, str]]:
    """What takes most in the largest program, if the compiler refuses it for its memory."""
    shortage = plan.programs[plan.largest].shortage
    return [] if shortage is None else shortage.largest


def estimated_peak(setup: Setup, backend: Backend) -> int | None:
    """The closed form of a step's peak; None: there is a pipeline, which has none."""
    return estimate(setup, backend).peak if setup.config.pipeline is None else None


def traffic_of(plan: Plan, program: Program, bandwidth: float | None) -> dict[str, Any]:
    """The collectives of a program, their bytes as compiled and in closed form, its run, and what is overlapped.

    - `bandwidth`: bytes a second that a device sends between slices; None: not known
    """
    closed_form = {",".join(axes): size for axes, size in bytes_by_axes(program.expected).items()}
    schedule = plan.schedule(program, bandwidth)
    return {
        **program.audit.to_dict(),
        "closed_form_bytes_per_step": closed_form,
        "estimate": None if schedule is None else estimate_of(plan, schedule),
        "overlap": overlap_of(program, schedule),
    }


def estimate_of(plan: Plan, schedule: Schedule) -> dict[str, float]:
    """Seconds of a run of a program; and the utilisation, as if it were a step."""
    model_flops = estimated_work(plan.setup, plan.link_bytes).model_flops
    return {
        "seconds": schedule.seconds,
        "compute_seconds": schedule.compute,
        "kernel_seconds": schedule.kernels,
        "exposed_seconds": schedule.exposed,
        "utilisation": model_flops / plan.target.flops_per_second / schedule.seconds,
    }


def program_of(plan: Plan, program: Program, bandwidth: float | None) -> dict[str, Any]:
    """One of a run's programs: its peak of memory, and its traffic in one run; `bandwidth` as of `traffic_of`."""
    refused = program.shortage is not None
    return {
        "peak": program.memory.peak,
        "refused": refused,
        "compiler_flops_per_device": program.flops,
        **traffic_of(plan, program, bandwidth),
    }


def overlap_of(program: Program, schedule: Schedule | None) -> dict[str, dict[str, float | None]]:
    """By link: payload bytes of a run, those started apart from their end, and the seconds hidden and exposed.

    Seconds are None where the compiler gives no estimates of cycles, or the link has no rate.
    """
    found: dict[str, dict[str, float | None]] = {}
    weighed = {} if schedule is None else schedule.links
    for link in dict.fromkeys(each.link for each in program.audit.collectives):
        here = [each for each in program.audit.collectives if each.link == link]
        times = weighed.get(link)
        found[link] = {
            "bytes": sum(each.bytes * (each.times or 1) for each in here),
            "asynchronous": sum(each.bytes * (each.times or 1) for each in here if each.is_async),
            "seconds": None if times is None else times.seconds,
            "hidden_seconds": None if times is None else times.hidden,
            "exposed_seconds": None if times is None else times.exposed,
        }
    return found


def roofline_of(plan: Plan, bound: Roofline) -> dict[str, Any]:
    return {
        "compute_seconds": bound.compute,
        "memory_seconds": bound.memory,
        "link_seconds": dict(bound.links),
        "host_seconds": bound.host,
        "step_seconds_overlapped": bound.overlapped,
        "step_seconds_one_after_another": bound.one_after_another,
        "mfu_bound": bound.mfu_bound,
        "sent_bytes": plan.link_bytes,
    }


def notes_of(plan: Plan) -> list[str]:
    """What a reader must know to read the figures rightly."""
    notes = []
    if plan.target.simulated:
        notes.append(
            "compiled by XLA:CPU for simulated devices; what crosses `replica` is taken to be between slices, and "
            "the compiler's peak holds all attention scores. --topology asks the TPU compiler."
        )
        if step_shape(plan.setup).compute_bytes < plan.target.backend.narrowest_bytes:
            notes.append("XLA:CPU widens bfloat16: it holds and sends 4 bytes where an accelerator has 2.")
    if plan.target.devices[0].platform == "gpu":
        notes.append(
            "compiled for GPUs without one: products and kernels are not tuned, what cuDNN and NCCL take for "
            f"themselves is not in the peak, no times are estimated. JAX takes {plan.target.share:.0%} of the memory."
        )
    period = plan.setup.method.traffic(step_shape(plan.setup)).period
    if len(plan.programs) > 1:
        notes.append(
            f"replicas are joined over {period} steps; where fragments differ in size, the programs are those of "
            "the largest. The roofline spreads what they send over those steps."
        )
    if plan.setup.config.pipeline is not None:
        notes.append(
            "a pipeline's memory has no closed form, so that no remedies are offered; the compiler's peak is exact. "
            "Idle stages compute too, and the roofline counts it."
        )
    if isinstance(plan.setup.method, Island):
        notes.append(
            "an island: the figures of its network are of one host and of the codecs' own bytes, with all islands "
            "taking part; outer parameters and the outer optimizer are in host memory."
        )
    if plan.until == MEMORY and plan.target.topology is not None:
        notes.append(
            "compiled to the memory report: the peak is without the program's code, some tens of MiB, and nothing is "
            "said of what the compiler overlaps. --until code tells both."
        )
    if any(program.shortage is not None for program in plan.programs.values()):
        notes.append(
            "the compiler refuses a program that does not fit; what is told of it is its schedule, before code is made."
        )
    if any("tpu_custom_call" in program.text for program in plan.programs.values()):
        notes.append(
            "the compiler estimates no cycles for Pallas kernels; those of attention are taken at the chip's peak."
        )
    collectives = [each for program in plan.programs.values() for each in program.audit.collectives]
    unknown = sum(len(program.audit.unknown()) for program in plan.programs.values())
    if unknown:
        notes.append(f"{unknown} collectives are among groups of devices that are no grid in the mesh.")
    if any(collective.times is None for collective in collectives):
        notes.append("a loop does not tell how often it runs; its collectives are counted once.")
    return notes
