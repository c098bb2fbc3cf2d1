"""How programs that run once are compiled: on a CPU their compilation takes far longer than they do."""

from __future__ import annotations

import os

from jax.sharding import Mesh

# Less than half of the processor time of the defaults for the quickstart's initial state, which is the same to the last
# bit and made as fast; level 0 would make other bits, and those of a large model four times slower.
_QUICKLY = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def fast_compile_options(mesh: Mesh) -> dict[str, int | bool] | None:
    """The `compiler_options` of `jax.jit` for a program that runs once on a mesh; what XLA_FLAGS says goes first."""
    if mesh.devices.flat[0].platform != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in _QUICKLY.items() if f"--{name}=" not in flags}
