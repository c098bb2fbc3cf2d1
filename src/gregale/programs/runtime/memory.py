"""Provides the check that programs fit into the free memory, before the first of them runs."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import jax
from rich.filesize import decimal

from gregale.axes.layout import Device
from gregale.checkpoint.multihost import first_message
from gregale.cost.memory import compiler_memory
from gregale.errors import UserError
from gregale.programs.runtime.setup import Setup

CGROUPS = {  # by the controllers of a line of /proc/self/cgroup: limit, use, and the prefix of names in memory.stat
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
CACHED = ("inactive_file", "active_file")  # pages of files in memory, which the kernel drops before it refuses memory


def check_program(setup: Setup, of: str, compiled: jax.stages.Compiled) -> None:
    """Raise `UserError` in all processes if a compiled program, whose arguments exist, does not fit.

    - `of`: what the program is of: `a step`
    """
    memory = compiler_memory(compiled, has_peak=setup.layout.mesh.devices.flat[0].platform != "cpu")
    batch = setup.config.batch
    size = f"batch.size {batch.size}, batch.sequence_length {batch.sequence_length}, microbatches {batch.microbatches}"
    check_fits(setup, f"a program of {of} ({size})", memory.peak - memory.arguments)


def check_fits(setup: Setup, what: str, needed: int) -> None:
    """Raise `UserError` in all processes if one of them has no memory for `needed` further bytes on each device."""
    devices, problem = setup.layout.mesh.local_devices, None
    count = len(devices) if devices[0].platform == "cpu" else 1  # CPU devices share the memory
    free, limit = min(free_bytes(devices[0]), default=(needed * count, ""))
    if needed * count > free:
        each = f" ({count} devices x {decimal(needed)})" if count > 1 else ""
        problem = (
            f"The memory does not suffice: {what} takes {decimal(needed * count)}{each} beside what exists already, "
            f"and {limit} {decimal(max(free, 0))}. More batch.microbatches, a smaller batch.size or model, or "
            "compute.remat full take less. `gregale plan` shows what each part takes."
        )
    if problem := first_message(problem):
        raise UserError(problem)


def free_bytes(device: Device) -> Iterator[tuple[int, str]]:
    """Yield the bytes that programs may still take by each limit of a device, or of the host of a CPU device."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:  # not with every allocator
            yield stats["bytes_limit"] - stats["bytes_in_use"], "the device has"
        return
    fields = dict(line.split(":") for line in read("/proc/meminfo").splitlines())
    yield 1024 * int(fields["MemAvailable"].split()[0]), "this machine has free"
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        taken = int(read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        yield limit - taken, "the limit of this process (ulimit -v) leaves"
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for root, *names, prefix in (CGROUPS[name] for name in CGROUPS.keys() & controllers.split(",")):
            for folder in (root / path[1:], *(root / path[1:]).parents):
                with suppress(OSError, ValueError, KeyError):  # a root has no such file, and a limit may be `max`
                    limit, used = (int(read(folder / each)) for each in names)
                    stat = dict(map(str.split, read(folder / "memory.stat").splitlines()))
                    cached = sum(int(stat[prefix + each]) for each in CACHED)
                    yield limit - used + cached, "the limit of this container (cgroup) leaves"


def read(path: Path | str) -> str:
    return Path(path).read_text(encoding="ascii")
