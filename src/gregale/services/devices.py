"""Starting JAX on the devices that a configuration asks for."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

from gregale.errors import UserError
from gregale.files import reason
from gregale.services.config import AUTO, DistributedConfig
from gregale.services.coordinator import way_to

# On a busy machine the threads of simulated devices can be minutes apart; XLA would abort the process after 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# With one thread a device, those that wait in a collective of the next step can leave none for a device that is still
# in the last one, and all wait for ever.
THREADS_A_DEVICE = 4

JOIN_SECONDS = 300  # within which all processes have to be there
JAX_PATIENCE = 3  # in units of distributed.timeout_seconds


def start_devices(cpu_devices: int | None, distributed: DistributedConfig) -> None:
    """Sets up JAX's platform and, for several processes, joins them; to be called before anything uses a device.

    With `cpu_devices`, each process simulates its share of that many CPU devices, joined over gloo. With the
    coordinator `auto`, JAX asks the cluster (TPU VMs, SLURM, Open MPI) for it and for the number of processes.
    """
    processes = distributed.processes
    if cpu_devices is not None:
        if cpu_devices % processes:
            raise UserError(
                f"cpu_devices is {cpu_devices}, but {processes} processes share them: {cpu_devices} / {processes} = "
                f"{cpu_devices / processes:.4g} is not a whole number. Use a multiple of {processes}."
            )
        os.environ.setdefault("PJRT_NPROC", str(THREADS_A_DEVICE * cpu_devices))
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices // processes)
    if processes > 1:
        if distributed.coordinator is None:
            raise UserError(
                f"distributed.processes is {processes}, but distributed.coordinator is not set: give HOST:PORT of "
                f"process 0, the same for all processes."
            )
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        coordinator = None if distributed.coordinator == AUTO else distributed.coordinator
        if coordinator is not None and distributed.process > 0:
            coordinator = way_to(coordinator, JOIN_SECONDS)
        _join(distributed, coordinator, processes, distributed.process)
    elif distributed.coordinator == AUTO:
        _join(distributed)


def _join(config: DistributedConfig, *place: Any) -> None:
    """Joins the processes. `gregale.services.peers` notices a lost one, long before JAX would abort the others."""
    seconds = math.ceil(JAX_PATIENCE * config.timeout_seconds)
    try:
        jax.distributed.initialize(
            *place,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=seconds,
            shutdown_timeout_seconds=seconds,
        )
    except RuntimeError as error:
        raise UserError(
            f"distributed: the processes did not find one another within {JOIN_SECONDS} s ({reason(error)}). Each of "
            f"the {config.processes} has to run with its own distributed.process and reach {config.coordinator}."
        ) from error
