"""Provides the devices to plan for: simulated ones, or those of a TPU or GPU topology, without hardware.

XLA's compiler for CUDA needs only a description of the GPUs: `gpu_devices("h100", boxes=2, each=8)` returns devices to
compile for. A box is one JAX process.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod

import jax

from gregale.axes.layout import Device
from gregale.cost.chips import Chip, chip
from gregale.distributed.devices import GPU_MEMORY, set_flags
from gregale.errors import UserError, install_hint
from gregale.runs.config import TrainConfig
from gregale.streams import say_beside

KIB, MIB = 2**10, 2**20
CUDA_PLUGINS = {"jax_cuda13_plugin": 13, "jax_cuda12_plugin": 12}  # plugin -> CUDA version
CUDNN = 9


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU for the compiler, besides those in `gregale.cost.chips`."""

    chip: str
    kind: str  # JAX's name of the device
    capability: int  # the compute capability's number before the point
    cores: int  # streaming multiprocessors, each with its `adders` for float32 and its `shared_bytes` of memory
    adders: int
    shared_bytes: int
    cache_bytes: int  # size of the second-level cache
    clock_ghz: float  # maximum clock


GPUS = {
    found.chip.lower(): found
    for found in (
        Gpu("A100-40GB", "NVIDIA A100-SXM4-40GB", 8, 108, 64, 164 * KIB, 40 * MIB, 1.41),
        Gpu("A100", "NVIDIA A100-SXM4-80GB", 8, 108, 64, 164 * KIB, 40 * MIB, 1.41),
        Gpu("H100", "NVIDIA H100 80GB HBM3", 9, 132, 128, 228 * KIB, 50 * MIB, 1.98),
        Gpu("H200", "NVIDIA H200", 9, 132, 128, 228 * KIB, 50 * MIB, 1.98),
        Gpu("B200", "NVIDIA B200", 10, 148, 128, 228 * KIB, 126 * MIB, 1.965),
    )
}


def gpu_devices(family: str, boxes: int, each: int) -> list[Device]:
    """Return the devices of `boxes` boxes with `each` GPUs; raise `UserError` if the compiler is missing or refuses."""
    cuda = next((version for plugin, version in CUDA_PLUGINS.items() if find_spec(plugin)), None)
    if cuda is None:
        raise UserError(
            "topology: the compiler for NVIDIA GPUs, which needs no GPU, is not installed. " + install_hint("cuda")
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides warnings about the missing driver
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    options = {"target_config": gpu_description(GPUS[family], cuda), "topology": f"{boxes}x1x{each}"}
    try:
        return list(topologies.get_topology_desc(family, platform="cuda", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"topology: the compiler rejects {family}:{each}: {' '.join(str(error).split())}.") from error


def gpu_description(gpu: Gpu, cuda: int) -> str:
    """Return XLA's `GpuTargetConfigProto` as text. `cuda`: version of the CUDA runtime."""
    found = chip(gpu.chip)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes - KIB}
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {gpu.cores}
  fpus_per_core: {gpu.adders}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(found.memory_bytes_per_second)}
  device_memory_size: {found.memory_bytes}
  l2_cache_size: {gpu.cache_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  cuda_compute_capability {{ major: {gpu.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN} }}
runtime_version {{ major: {cuda} }}
device_description_str: "{gpu.kind}"
"""


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
        gpu_devices = topologies.get_topology_desc(name, platform="tpu", num_slices=slices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"topology: the TPU compiler does not take {name!r}: {reason}.") from error
    grid = tuple(int(size) for size in sizes)
    found = chip(chip_name or CHIP_OF_TOPOLOGY[family]).in_slice(grid)
    return Target(
        list(gpu_devices.devices), found, len(gpu_devices.devices) // (prod(grid) * slices), False, (name, slices)
    )


def _gpus(name: str, boxes: int, chip_name: str | None) -> Target:
    family, _, each = name.partition(":")
    if not each.isdecimal():
        raise UserError(
            f"topology: {name!r}: of GPUs it is a number in a box, such as {family}:8, and slices are boxes."
        )
    found = chip(chip_name or GPUS[family].chip)
    return Target(gpu_devices(family, boxes, int(each)), found, found.devices, simulated=False, share=GPU_MEMORY)


def for_accelerators(config: TrainConfig, target: Target) -> TrainConfig:
    """Return the configuration to compile; on simulated devices, with the settings of an accelerator.

    The platform determines the differentiation rules and the number of unrolled layers. A plan for accelerators on
    simulated devices uses those of accelerators, but without their attention kernels, which XLA:CPU lacks.
    """
    if target.simulated and config.cpu_devices is None:
        compute = replace(config.compute, autodiff_rules="plain", attention="xla", unroll=config.compute.unroll or 1)
        return replace(config, compute=compute)
    return config
