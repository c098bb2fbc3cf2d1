"""Provides the devices to plan for: simulated ones, or those of a TPU or GPU topology, without hardware."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod

import jax

from gregale.audit.chips import Chip, chip
from gregale.audit.estimate import ACCELERATOR, CPU, TPU, Backend
from gregale.axes.layout import Device
from gregale.distributed.devices import GPU_MEMORY, set_flags
from gregale.errors import UserError, install_hint
from gregale.programs.plan.gpus import GPUS, described
from gregale.runs.config import TrainConfig
from gregale.streams import say_beside

DEFAULT_CHIP = "H100"
CHIP_OF_TOPOLOGY = {"v4": "v4", "v5e": "v5e", "v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "v7x"}
KNOWN = ", ".join(family for family in (*CHIP_OF_TOPOLOGY, *GPUS) if family != "v5litepod")
# Without a TPU there is no metadata server, and no chip that another process could hold. Without a type and a host the
# compiler logs errors; it takes both from the topology, whatever they are.
WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Target:
    """The devices of a plan."""

    devices: list[Device]
    chip: Chip
    devices_a_chip: int  # JAX devices of a chip
    simulated: bool  # they are simulated CPU devices, for which XLA:CPU compiles
    topology: tuple[str, int] | None = None  # the TPU topology and its number of slices, as for `topology_target`
    share: float = 1.0  # the share of the chip's memory that JAX uses

    @property
    def backend(self) -> Backend:
        if self.simulated:
            return CPU
        return TPU if self.devices[0].platform == "tpu" else ACCELERATOR

    @property
    def memory_bytes(self) -> int:
        return int(self.share * self.chip.memory_bytes) // self.devices_a_chip


def simulated_target(config: TrainConfig, count: int | None, chip_name: str | None) -> Target:
    """Return simulated CPU devices, before any other use of one; raise `UserError` if JAX has started with fewer."""
    count = count or config.cpu_devices or _mesh_size(config)
    if config.cpu_devices is not None:  # The run uses CPU devices too, so that the plan has the programs of `train`.
        set_flags(count)
    jax.config.update("jax_platforms", "cpu")
    with suppress(RuntimeError):  # JAX already has devices, as in tests
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(f"devices is {count}, but JAX was started with {len(devices)} CPU devices in this process.")
    target = chip(chip_name or DEFAULT_CHIP)
    return Target(devices[:count], target, target.devices, simulated=True)


def _mesh_size(config: TrainConfig) -> int:
    """Return the number of devices of the mesh; if it is open, the fewest, and say so."""
    if (count := config.mesh.device_count) is not None:
        return count
    fewest = config.mesh.fewest_devices
    say_beside(
        f"mesh.{config.mesh.free[0]} is -1, so the number of devices is open: this plan is for the fewest, {fewest}, "
        "and for sizes of accelerators. Others: `--devices 8`, `--cpu_devices 8`, `--topology v5e:4x4`."
    )
    return fewest


def topology_target(name: str, slices: int, chip_name: str | None) -> Target:
    """Return the devices of a topology with one or more slices; call it before any use of a device.

    A slice of GPUs is a box. Raises `UserError` if the compiler is not installed, or it does not know the topology.
    """
    family, _, shape = name.partition(":")
    sizes = shape.split("x")
    is_grid = name.isascii() and all(size.isdecimal() and int(size) > 0 for size in sizes)
    if not is_grid or family not in {*CHIP_OF_TOPOLOGY, *GPUS}:
        raise UserError(
            f"topology: {name!r} is not FAMILY:SHAPE, such as v5e:4x4, v5p:4x4x4 or h100:8; the families are {KNOWN}."
        )
    if family in GPUS:
        return _gpus(name, slices, chip_name)
    if find_spec("libtpu") is None:
        raise UserError(f"topology: the TPU compiler is not installed. {install_hint('tpu')}")
    os.environ.update(WITHOUT_A_TPU)
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(name, platform="tpu", num_slices=slices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"topology: the TPU compiler does not take {name!r}: {reason}.") from error
    grid = tuple(int(size) for size in sizes)
    found = chip(chip_name or CHIP_OF_TOPOLOGY[family]).in_slice(grid)
    return Target(
        list(described.devices), found, len(described.devices) // (prod(grid) * slices), False, (name, slices)
    )


def _gpus(name: str, boxes: int, chip_name: str | None) -> Target:
    family, _, each = name.partition(":")
    if not each.isdecimal():
        raise UserError(
            f"topology: {name!r}: of GPUs it is a number in a box, such as {family}:8, and slices are boxes."
        )
    found = chip(chip_name or GPUS[family].chip)
    return Target(described(family, boxes, int(each)), found, found.devices, simulated=False, share=GPU_MEMORY)


def for_accelerators(config: TrainConfig, target: Target) -> TrainConfig:
    """Return the configuration to compile; on simulated devices, with the settings of an accelerator.

    The platform determines the differentiation rules and the number of unrolled layers. A plan for accelerators on
    simulated devices uses those of accelerators, but without their attention kernels, which XLA:CPU lacks.
    """
    if target.simulated and config.cpu_devices is None:
        compute = replace(config.compute, autodiff_rules="plain", attention="xla", unroll=config.compute.unroll or 1)
        return replace(config, compute=compute)
    return config
