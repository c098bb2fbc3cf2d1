"""The compiler options of a run's programs: the defaults of the chip family and those of the configuration.

The defaults make collectives asynchronous for which the TPU compiler otherwise waits. All programs of a run get them:
steps, rounds, evaluations, the initial state, conversions between methods, and sampling.
"""

import os

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.errors import UserError
from gregale.model.config import CompilerOptions

# Overlap the gathers of weights with the layer's own products, where the compiler does not do so by itself.
_GATHERS_STAY = "xla_tpu_prefer_async_allgather_to_allreduce"
_ASYNC_GATHERS = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
    _GATHERS_STAY,
)
# Overlap the sum of a layer's gradients with the backward pass of the layer below: pipeline the loop by one layer.
_PIPELINED_SUMS = "xla_tpu_enable_ici_ar_pipelining"
_ASYNC_SUMS = (
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    _PIPELINED_SUMS,
)
# Bytes up to which sums are merged. The compiler's own merges all gradients of attention into one that it waits for.
_MERGED_SUMS = "xla_jf_crs_combiner_threshold_in_bytes"
# KiB of vector memory for one operation: with twice the compiler's default (16 MiB, on v6e 32 MiB) products use larger
# blocks and are nearer to the peak.
_SCOPED_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
# The compiler cuts a product whose weight is gathered, or whose gradient is scattered, over few devices into a loop of
# products of their parts. They have half the rate of the whole, which the transfers behind them do not make up for.
# The threshold is in MiB: none is so large.
_UNCUT_PRODUCTS = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
# By `jax.Device.device_kind`; "TPU v5" is v5p. docs/plan.md explains each option.
DEFAULTS: dict[str, CompilerOptions] = {
    "TPU v5 lite": {
        **dict.fromkeys((_GATHERS_STAY, *_ASYNC_SUMS), True),
        _MERGED_SUMS: 16 << 20,
        _SCOPED_MEMORY: 32768,
        _UNCUT_PRODUCTS: 1 << 20,
    },
    "TPU v5": {**dict.fromkeys((*_ASYNC_GATHERS, *_ASYNC_SUMS), True), _SCOPED_MEMORY: 32768},
    "TPU v6 lite": {**dict.fromkeys((*_ASYNC_GATHERS, *_ASYNC_SUMS), True), _SCOPED_MEMORY: 65536},
}
# On NVIDIA GPUs, gather a layer while the layer before it computes, and sum its gradients while the next gradients are
# computed. Other options that are advised for GPUs are now the compiler's defaults, or slow it down: docs/gpu.md.
GPU_DEFAULTS: CompilerOptions = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
GPUS = "NVIDIA "

PLATFORMS = ("cpu", "gpu", "tpu")


def compiler_options(given: CompilerOptions, mesh: Mesh, experts: bool = False) -> CompilerOptions | None:
    """Return the options for the devices of a mesh; `given` options override the defaults. None if there are none.

    Options of another platform (`xla_tpu_...` on a CPU) are ignored, so that a run can be sampled elsewhere.

    - `experts`: layers have experts. Sums of their gradients that are pipelined by a layer do not fit in a TPU's vector
      memory: the compiler rejects the program. Without that it sums and scatters most of them in one step.
    """
    device = mesh.devices.flat[0]
    kind = getattr(device, "device_kind", "")
    defaults = GPU_DEFAULTS if kind.startswith(GPUS) else DEFAULTS.get(kind, {})
    others = tuple(f"xla_{platform}_" for platform in PLATFORMS if platform != device.platform)
    own = {name: value for name, value in given.items() if not name.startswith(others)}
    if experts and _PIPELINED_SUMS in defaults:
        defaults = {**defaults, _PIPELINED_SUMS: False}
    return {**defaults, **own} or None


def sums_behind(options: CompilerOptions) -> bool:
    """Return whether a program's options overlap the sums of gradients with the backward pass of the layers below."""
    return str(options.get(_ASYNC_SUMS[0])).lower() == "true"


def check_compiler_options(options: CompilerOptions, mesh: Mesh) -> None:
    """Check the options by compiling a trivial program; raise `UserError` if the compiler rejects the options."""
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
        kind = mesh.devices.flat[0].device_kind
        raise UserError(f"compute.compiler_options: the compiler for {kind} does not take them: {reason}.") from error


# For the quickstart's initial state, compilation takes less than half the processor time of the defaults, the run time
# is equal and the result is bit-identical. Level 0 changes bits, and makes a large model's state four times slower.
_QUICKLY = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def fast_compile_options(mesh: Mesh) -> dict[str, int | bool] | None:
    """Return options for a program that runs once: a CPU compiles it longer than it runs. XLA_FLAGS have priority."""
    if mesh.devices.flat[0].platform != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in _QUICKLY.items() if f"--{name}=" not in flags}
