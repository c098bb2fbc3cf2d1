"""Provides boxes of NVIDIA GPUs without hardware: XLA's compiler for CUDA needs only their description.

`described("h100", boxes=2, each=8)` returns devices to compile for. A box is one JAX process.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

import jax

from gregale.audit.chips import chip
from gregale.axes.layout import Device
from gregale.errors import UserError, install_hint

KIB, MIB = 2**10, 2**20
PLUGINS = {"jax_cuda13_plugin": 13, "jax_cuda12_plugin": 12}  # plugin -> CUDA version
CUDNN = 9


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU for the compiler, besides those in `gregale.audit.chips`."""

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


def described(family: str, boxes: int, each: int) -> list[Device]:
    """Return the devices of `boxes` boxes with `each` GPUs; raise `UserError` if the compiler is missing or refuses."""
    cuda = next((version for plugin, version in PLUGINS.items() if find_spec(plugin)), None)
    if cuda is None:
        raise UserError(
            "topology: the compiler for NVIDIA GPUs, which needs no GPU, is not installed. " + install_hint("cuda")
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides warnings about the missing driver
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    options = {"target_config": description(GPUS[family], cuda), "topology": f"{boxes}x1x{each}"}
    try:
        return list(topologies.get_topology_desc(family, platform="cuda", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"topology: the compiler rejects {family}:{each}: {' '.join(str(error).split())}.") from error


def description(gpu: Gpu, cuda: int) -> str:
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
