"""Options that the programs of a run are compiled with: a chip family's own, and those of the configuration.

    jax.jit(step, compiler_options=compiler_options(config.compute.compiler_options, mesh))

The defaults make collectives asynchronous that the TPU compiler else waits for. All programs of a run get them: steps,
rounds, evaluations, the initial state, what goes from one method to another, and sampling.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.errors import UserError
from gregale.model.config import CompilerOptions

# Gathers of weights behind the layer's own products, where the compiler does not do so by itself.
_ASYNC_GATHERS = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
    "xla_tpu_prefer_async_allgather_to_allreduce",
)
# Sums of a layer's gradients behind the backward pass of the layer below: the loop is pipelined by one layer.
_ASYNC_SUMS = (
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_ici_ar_pipelining",
)
# KiB of vector memory that an operation has for itself: with twice the compiler's own (16 MiB, on v6e 32) products
# take larger blocks, and are nearer to the peak.
_SCOPED_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
# By `jax.Device.device_kind`; "TPU v5" is v5p. docs/plan.md has what each of them does.
DEFAULTS: dict[str, CompilerOptions] = {
    "TPU v5 lite": {**dict.fromkeys(_ASYNC_SUMS, True), _SCOPED_MEMORY: 32768},
    "TPU v5": {**dict.fromkeys((*_ASYNC_GATHERS, *_ASYNC_SUMS), True), _SCOPED_MEMORY: 32768},
    "TPU v6 lite": {**dict.fromkeys((*_ASYNC_GATHERS, *_ASYNC_SUMS), True), _SCOPED_MEMORY: 65536},
}
# On NVIDIA's GPUs a layer is gathered while the layer before it computes, and its gradients are summed while the next
# one's are computed. What else is advised for GPUs is the compiler's own default by now, or does harm: docs/gpu.md.
GPU_DEFAULTS: CompilerOptions = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
GPUS = "NVIDIA "

PLATFORMS = ("cpu", "gpu", "tpu")


def compiler_options(given: CompilerOptions, mesh: Mesh) -> CompilerOptions | None:
    """The options for the devices of a mesh; `given` go over the defaults. None: there are none.

    What is given for another platform (`xla_tpu_...` on a CPU) is left out, so that a run can be sampled elsewhere.
    """
    device = mesh.devices.flat[0]
    kind = getattr(device, "device_kind", "")
    defaults = GPU_DEFAULTS if kind.startswith(GPUS) else DEFAULTS.get(kind, {})
    others = tuple(f"xla_{platform}_" for platform in PLATFORMS if platform != device.platform)
    own = {name: value for name, value in given.items() if not name.startswith(others)}
    return {**defaults, **own} or None


def sums_behind(options: CompilerOptions) -> bool:
    """Whether gradients are summed behind the backward pass of the layers below, by the options of a program."""
    return str(options.get(_ASYNC_SUMS[0])).lower() == "true"


def check_compiler_options(options: CompilerOptions, mesh: Mesh) -> None:
    """Compiles next to nothing with the options.

    Raises:
        UserError: the compiler does not take them.
    """
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
        kind = mesh.devices.flat[0].device_kind
        raise UserError(f"compute.compiler_options: the compiler for {kind} does not take them: {reason}.") from error
