"""Starting JAX on the devices that a configuration asks for."""

from __future__ import annotations

import os

import jax

from gregale.errors import UserError
from gregale.services.config import AUTO, DistributedConfig

# On a busy machine the threads of simulated devices can be minutes apart; XLA would abort the process after 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# With one thread a device, those that wait in a collective of the next step can leave none for a device that is still
# in the last one, and all wait for ever.
THREADS_A_DEVICE = 4


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
        jax.distributed.initialize(distributed.coordinator, processes, distributed.process)
    elif distributed.coordinator == AUTO:
        jax.distributed.initialize()
