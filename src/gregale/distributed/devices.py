"""The devices of a process: how it joins the others, and its settings before JAX starts."""

import ctypes
import hashlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from threading import Thread, Timer
from types import MappingProxyType

import jax
import jaxlib.version
from jax._src.clusters import ClusterEnv, cloud_tpu_cluster  # no public function asks the cluster without joining

from gregale.distributed.config import AUTO, DistributedConfig
from gregale.distributed.liveness import EXIT_CODE, LivenessMonitor, log_line
from gregale.distributed.rendezvous import Terms, agree, format_term, wait_for_processes
from gregale.errors import UserError
from gregale.version import __version__

# Parameter -> value, with the numbers of glibc's malloc.h. Few arenas, which grow by at least 64 MiB and never shrink;
# no allocation is mapped separately, since free() would unmap it. Only the main arena keeps all its memory. One arena
# alone is slow: compiling fragments it, and threads then wait for its lock (twice the time on eight devices).
OPTIONS = {-8: 4, -4: 0, -1: 2**31 - 1, -2: 64 << 20}  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make glibc's malloc keep freed memory unless the user has configured it; return whether this succeeded.

    By default glibc maps and unmaps the temporaries of each step. The page faults take a tenth to a fifth of a step's
    processor time. Call this before JAX starts its threads, which would create other arenas. The cost: memory that was
    used once, also for loading and compiling, is not returned before the process ends.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment):
        return False
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    results = [mallopt(parameter, value) for parameter, value in OPTIONS.items()]  # 1; 0: unknown parameter
    return all(results)


def release_memory() -> None:
    """Return unused memory to the system (glibc only), for code that loads large arrays in sequence without steps."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, OSError, ValueError):  # Windows, musl, macOS
        return False


# On a busy machine the threads of simulated devices can be minutes apart; XLA would abort the process after 40 s.
COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# The fraction of a GPU's memory that JAX allocates at its start, and its limit. JAX's default is 0.75; CUDA, NCCL and
# cuBLAS need a few hundred MiB each besides.
GPU_MEMORY = 0.92

# Use Eigen and XLA's own loops for products and sums instead of YNN. With the rules of `gregale.model.kernels.cpu` a
# step on one device then takes a tenth less processor time and an eighth less memory; on eight devices, equal time and
# less memory. XLA aborts on an unknown flag, so only versions that have this flag get it.
WITHOUT_YNN = "--xla_cpu_experimental_ynn_fusion_type="
WITHOUT_YNN_BEFORE = (0, 11)

# With two threads or fewer per device, the step can deadlock: waiting threads of the next step's collective leave no
# thread for a device that is still in the previous step. Eight devices deadlocked with 15 threads, and not with 16.
# More threads cost time, because Eigen cuts a product into as many parts as there are threads.
THREADS_A_DEVICE = 3

# With at least as many simulated devices as processors, a loop that is split over all threads is slower than one loop.
WITHOUT_PARALLEL_LOOPS = "--xla_disable_hlo_passes=cpu-parallel-task-assigner"

# Values of JAX and flags that leave the programs of a run as they are, so that its processes may differ in them.
MAY_DIFFER = (
    *("jax_*_visible_devices", "jax_cross_host_*address*"),  # a process's devices on its host, and the host's addresses
    *("*_cache*", "jax_raise_persistent_cache_errors"),  # where and how compiled programs are kept
    *("jax_dump_*", "*xla_dump_*", "jax_include_debug_info_in_dumps"),  # files for the user
    *("jax_log*", "*_debug_log*", "*_distributed_debug", "*_logging_*", "jax_trace*", "*_pprint_*"),  # its own log
)


def environment_terms() -> Terms:
    """Return the values of JAX, and the flags of XLA and libtpu, that all processes of a run must have in common.

    They come from the environment and from a program's own calls. A flag whose value is a path may differ: hosts have
    different folders. Call this before Gregale adds flags of its own, which depend on the number of processors.
    """
    values = {name: format_term(value) for name, value in jax.config.values.items()}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = [flag.partition("=") for flag in os.environ.get(variable, "").split()]
        values |= {f"{variable} {name}": value or "true" for name, _, value in flags if os.sep not in value}
    return {name: value for name, value in values.items() if not any(fnmatchcase(name, each) for each in MAY_DIFFER)}


def version_terms() -> Terms:
    """Return the versions that all processes of a run must have in common."""
    return {
        "the version of Gregale": __version__,
        "the digest of Gregale's source": source_digest(),
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
    }


@cache
def source_digest() -> str:
    """Return a digest of the source of this package; two checkouts of one version may differ in it."""
    folder, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


# The rule that Google adds to the network of TPU slices opens this port between them, and not JAX's (jax issue 35905).
cloud_tpu_cluster.coordinator_port = "8476"
JAX_TIMEOUT = 3  # in units of distributed.timeout_seconds
_RETRY_SECONDS = 0.2


def start_devices(
    cpu_devices: int | None, distributed: DistributedConfig, terms: Terms = MappingProxyType({})
) -> LivenessMonitor | None:
    """Set up JAX's platform and join the processes; call this before anything uses a device.

    Returns the monitor of the other processes for `gregale.distributed.liveness.monitor_peers`; None if there are none.

    On CPU devices the process keeps its memory (`gregale.distributed.devices`). On a GPU, JAX takes the fraction
    `GPU_MEMORY` of the memory, unless the environment sets another fraction.

    With `cpu_devices`, each process simulates its share of that many CPU devices, joined over gloo. A process in which
    JAX has started already, such as a notebook, needs at least as many CPU devices. With the
    coordinator `auto`, the cluster (TPU VMs, Slurm, Open MPI, Kubernetes) provides the coordinator, the number of
    processes and the number of this process.

    - `terms`: the settings that all processes must have in common; environment and versions are always compared
    """
    terms = {**version_terms(), **terms, **environment_terms()}
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
        simulate(cpu_devices // processes)
    if jax.config.jax_platforms == "cpu":  # pyright: ignore[reportAttributeAccessIssue] -- made at run time
        keep_memory()
    if processes > 1 and distributed.coordinator is None:
        raise UserError(
            f"distributed.processes is {processes}, but distributed.coordinator is not set: give HOST:PORT of process "
            f"0, the same for all processes."
        )
    return _join(distributed, terms) if processes > 1 or is_auto else None


def simulate(devices: int) -> None:
    """Set the number of this process's CPU devices; raise `UserError` if JAX has started with fewer, or with others."""
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # JAX has started with another number
        found = jax.local_devices()
        if found[0].platform != "cpu" or len(found) < devices:
            raise UserError(
                f"{devices} CPU devices are to be simulated (cpu_devices), but JAX has started in this process with "
                f"{len(found)} {found[0].platform} device(s), and starts once only. Restart the process (a notebook: "
                f"its kernel) and begin with this call, or use fewer devices."
            ) from None
    else:
        jax.config.update("jax_platforms", "cpu")


def set_flags(cpu_devices: int) -> None:
    """Set XLA's flags for CPU devices, for this process and its children; call this before a device is used."""
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), cpu_devices)


def with_flags(flags: str, cpu_devices: int) -> str:
    """Return XLA's flags with the flags for CPU devices appended; flags that are already set stay."""
    wanted = [COLLECTIVE_TIMEOUT]
    wanted += [WITHOUT_YNN] if jax.__version_info__ < WITHOUT_YNN_BEFORE else []
    wanted += [WITHOUT_PARALLEL_LOOPS] if 1 < cpu_devices >= (os.cpu_count() or 1) else []
    return " ".join([flags, *(flag for flag in wanted if f"{flag.partition('=')[0]}=" not in flags)]).strip()


def by_cluster(config: DistributedConfig) -> DistributedConfig:
    """Return the configuration with the values of the cluster; raise `UserError` if JAX finds no cluster."""
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
            "distributed.coordinator is auto, but JAX finds no cluster here (TPU VMs, Slurm, Open MPI, Kubernetes). "
            "Give HOST:PORT of process 0, distributed.processes and distributed.process; or leave all three out for a "
            "run in one process."
        )
    return replace(config, coordinator=address, processes=processes, process=process)


def _join(config: DistributedConfig, terms: Terms) -> LivenessMonitor | None:
    """Join the processes after the rendezvous and the settings check; exit if a process is missing or lost."""
    monitor, coordinator = None, config.coordinator or ""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if config.processes > 1:
        peers = wait_for_processes(config)
        agree(peers, config, terms)
        monitor = LivenessMonitor(peers, config)
        monitor.start()
        coordinator = start_proxy(coordinator) if config.process > 0 else coordinator
    timer = Timer(config.join_seconds, _exit_after_timeout, [config])
    timer.daemon = True
    timer.start()
    seconds = math.ceil(JAX_TIMEOUT * config.timeout_seconds)
    jax.distributed.initialize(
        coordinator,
        config.processes,
        config.process,
        initialization_timeout=math.ceil(2 * config.join_seconds),
        heartbeat_timeout_seconds=seconds,
        shutdown_timeout_seconds=seconds,
    )
    timer.cancel()
    return monitor


def _exit_after_timeout(config: DistributedConfig) -> None:
    """Log the timeout and exit; JAX would abort the process with a stack of C++ frames."""
    log_line(
        f"error: distributed: all {config.processes} processes have joined, but JAX could not connect them through "
        f"{config.coordinator} within {config.join_seconds:g} s (distributed.join_seconds)."
    )
    os._exit(EXIT_CODE)


def start_proxy(coordinator: str) -> str:
    """Wait for JAX's coordinator (HOST:PORT) in process 0; return the address of a local port that forwards to it.

    JAX's client aborts its process, with a stack of C++ frames, as soon as its connection to the coordinator closes. No
    setting prevents it. So the other processes connect to a local port, and threads forward everything to the
    coordinator and back. When process 0 ends, that port stays open, and `gregale.distributed.liveness` reports the lost
    process.
    """
    host, _, port = coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    while True:
        with suppress(OSError):
            socket.create_connection(address, timeout=10).close()
            break
        time.sleep(_RETRY_SECONDS)
    server = socket.create_server(("127.0.0.1", 0))
    Thread(target=_serve, args=(server, address), daemon=True, name="coordinator").start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _serve(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        Thread(target=_forward, args=(client, address), daemon=True).start()


def _forward(client: socket.socket, address: tuple[str, int]) -> None:
    """Forward a connection of JAX's client to the coordinator.

    The connection stays open until the client closes it, even if the coordinator cannot be reached. The client then
    waits until `gregale.distributed.liveness` has found the lost process.
    """
    with client:
        with suppress(OSError), socket.create_connection(address, timeout=10) as coordinator:
            coordinator.settimeout(None)
            for connection in (client, coordinator):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Thread(target=_copy, args=(coordinator, client), daemon=True).start()
            _copy(client, coordinator)
            coordinator.shutdown(socket.SHUT_RDWR)  # wakes the other thread
        with suppress(OSError):
            while client.recv(1 << 16):
                pass


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # loaded before any fork


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Make the kernel send the signal `number` to this process when its parent ends.

    - `parent`: the parent's process id, for a call after the start of this process: if the parent has already ended,
      this process ends at once
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
