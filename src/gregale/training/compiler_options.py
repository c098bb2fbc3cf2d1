"""Options that the programs of a run are compiled with: a chip family's own, and those of the configuration.

    jax.jit(step, compiler_options=compiler_options(config.compute.compiler_options, mesh))

The defaults make collectives asynchronous that the TPU compiler else waits for.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.errors import UserError

_ASYNC_GATHERS = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
)
# By `jax.Device.device_kind`; "TPU v5" is v5p, whose gathers else are all-reduces.
DEFAULTS: dict[str, tuple[str, ...]] = {
    "TPU v5": ("xla_tpu_prefer_async_allgather_to_allreduce",),
    "TPU v6 lite": _ASYNC_GATHERS,
}
# On NVIDIA's GPUs a layer is gathered while the layer before it computes, and its gradients are summed while the next
# one's are computed. What else is advised for GPUs is the compiler's own default by now, or does harm: docs/gpu.md.
GPU_DEFAULTS = ("xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_pipelined_reduce_scatter")
GPUS = "NVIDIA "

Value = bool | int | float | str


def compiler_options(given: Mapping[str, Value], mesh: Mesh) -> dict[str, Value] | None:
    """The options for the devices of a mesh; `given` go over the defaults. None: there are none.

    Raises:
        UserError: the compiler does not take what is given.
    """
    kind = getattr(mesh.devices.flat[0], "device_kind", "")
    defaults = GPU_DEFAULTS if kind.startswith(GPUS) else DEFAULTS.get(kind, ())
    options: dict[str, Value] = {**dict.fromkeys(defaults, True), **given}
    if given:
        _try(options, mesh)
    return options or None


def _try(options: dict[str, Value], mesh: Mesh) -> None:
    """Compiles next to nothing with the options."""
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
        kind = mesh.devices.flat[0].device_kind
        raise UserError(f"compute.compiler_options: the compiler for {kind} does not take them: {reason}.") from error
