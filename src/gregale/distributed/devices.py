"""Starting JAX on the devices that a configuration asks for."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from threading import Timer
from types import MappingProxyType

import jax
from jax._src.clusters import ClusterEnv  # nothing public tells what a cluster knows without joining

from gregale.distributed.agreement import Terms
from gregale.distributed.config import AUTO, DistributedConfig
from gregale.distributed.coordinator_proxy import start_proxy
from gregale.distributed.liveness import EXIT_CODE, LivenessMonitor, log_line
from gregale.distributed.malloc_tuning import keep_memory
from gregale.distributed.rendezvous import roll_call
from gregale.distributed.settings_check import agree
from gregale.errors import UserError

# On a busy machine the threads of simulated devices can be minutes apart; XLA would abort the process after 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# The share of a GPU's memory that JAX takes when it starts, and more it never has. JAX's own is three quarters; what
# CUDA, NCCL and cuBLAS hold beside is a few hundred MiB each.
GPU_MEMORY = 0.92

# Products and sums by Eigen and XLA's own loops, none by YNN: with the rules of `gregale.model.kernels.cpu` a step then
# takes a tenth less processor time and an eighth less memory on one device; on eight as much time, and less memory. XLA
# ends a process that gives it a flag that it does not know, so only versions known to have this one get it.
WITHOUT_YNN = "--xla_cpu_experimental_ynn_fusion_type="
WITHOUT_YNN_BEFORE = (0, 11)

# With two threads a device or fewer, those that wait in a collective of the next step can leave none for a device that
# is still in the last one, and all wait for ever: of eight devices with 15 threads, not seen with 16. Each thread more
# costs: Eigen cuts a product into as many parts as there are threads.
THREADS_A_DEVICE = 3

# Simulated devices are as many as the processors, or more: a loop that is cut into parts for all of their threads takes
# longer than one.
WITHOUT_PARALLEL_LOOPS = "--xla_disable_hlo_passes=cpu-parallel-task-assigner"

JAX_PATIENCE = 3  # in units of distributed.timeout_seconds


def start_devices(
    cpu_devices: int | None, distributed: DistributedConfig, terms: Terms = MappingProxyType({})
) -> LivenessMonitor | None:
    """Sets up JAX's platform and, for several processes, joins them; to be called before anything uses a device.

    Returns the watch of the other processes, for `gregale.distributed.liveness.monitor_peers`; None if there are none.

    On CPU devices the process keeps its memory (`gregale.distributed.malloc_tuning`). Of a GPU's memory JAX takes the
    fraction `GPU_MEMORY`, unless the environment sets another one.

    With `cpu_devices`, each process simulates its share of that many CPU devices, joined over gloo. With the
    coordinator `auto`, the cluster (TPU VMs, Slurm, Open MPI, Kubernetes) is asked for it, the number of processes, and
    which of them this one is.

    - `terms`: the settings that all processes need to have in common; the versions are compared in any case
    """
    is_auto = distributed.coordinator == AUTO
    if is_auto:
        distributed = by_cluster(distributed)
    processes = distributed.processes
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY))
    if cpu_devices is not None:
        if cpu_devices % processes:
            raise UserError(
                f"cpu_devices is {cpu_devices}, but {processes} processes share them: {cpu_devices} / {processes} = "
                f"{cpu_devices / processes:.4g} is not a whole number. Use a multiple of {processes}."
            )
        if cpu_devices > 1:
            os.environ.setdefault("PJRT_NPROC", str(THREADS_A_DEVICE * cpu_devices))
        set_flags(cpu_devices)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices // processes)
    if jax.config.jax_platforms == "cpu":  # pyright: ignore[reportAttributeAccessIssue] -- made at run time
        keep_memory()
    if processes > 1 and distributed.coordinator is None:
        raise UserError(
            f"distributed.processes is {processes}, but distributed.coordinator is not set: give HOST:PORT of process "
            f"0, the same for all processes."
        )
    return _joined(distributed, terms) if processes > 1 or is_auto else None


def set_flags(cpu_devices: int) -> None:
    """XLA's flags for CPU devices, for this process and those that it starts; before anything uses a device."""
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), cpu_devices)


def with_flags(flags: str, cpu_devices: int) -> str:
    """XLA's flags with those for CPU devices after them; a flag that is there already stays as it is."""
    wanted = [PATIENCE]
    wanted += [WITHOUT_YNN] if jax.__version_info__ < WITHOUT_YNN_BEFORE else []
    wanted += [WITHOUT_PARALLEL_LOOPS] if 1 < cpu_devices >= (os.cpu_count() or 1) else []
    return " ".join([flags, *(flag for flag in wanted if f"{flag.partition('=')[0]}=" not in flags)]).strip()


def by_cluster(config: DistributedConfig) -> DistributedConfig:
    """The configuration with what the cluster knows; raises `UserError` if JAX knows of no cluster here."""
    given = (config.processes, config.process) if config.processes > 1 else (None, None)
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, *given, [], None, math.ceil(config.join_seconds)
        )
    except RuntimeError as error:  # the host of process 0 has no address yet
        log_line(f"error: distributed.coordinator is auto: {error}, in {config.join_seconds:g} s.")
        sys.exit(EXIT_CODE)
    address, processes, process, _ = found
    if address is None or processes is None or process is None:
        raise UserError(
            "distributed.coordinator is auto, but JAX finds no cluster here that would know it (TPU VMs, Slurm, Open "
            "MPI, Kubernetes). Give HOST:PORT of process 0, distributed.processes and distributed.process; or leave "
            "all three out for a run in one process."
        )
    return replace(config, coordinator=address, processes=processes, process=process)


def _joined(config: DistributedConfig, terms: Terms) -> LivenessMonitor | None:
    """Joins the processes, when all are there and agree; ends this one if one does not come, or is lost meanwhile."""
    watch, coordinator = None, config.coordinator or ""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if config.processes > 1:
        peers = roll_call(config)
        agree(peers, config, terms)
        watch = LivenessMonitor(peers, config)
        watch.start()
        coordinator = start_proxy(coordinator) if config.process > 0 else coordinator
    late = Timer(config.join_seconds, _end_alone, [config])
    late.daemon = True
    late.start()
    seconds = math.ceil(JAX_PATIENCE * config.timeout_seconds)
    jax.distributed.initialize(
        coordinator,
        config.processes,
        config.process,
        initialization_timeout=math.ceil(2 * config.join_seconds),
        heartbeat_timeout_seconds=seconds,
        shutdown_timeout_seconds=seconds,
    )
    late.cancel()
    return watch


def _end_alone(config: DistributedConfig) -> None:
    """JAX would abort the process, with a stack of C++ frames."""
    log_line(
        f"error: distributed: all {config.processes} processes are there, but JAX could not join them by "
        f"{config.coordinator} within {config.join_seconds:g} s (distributed.join_seconds)."
    )
    os._exit(EXIT_CODE)
