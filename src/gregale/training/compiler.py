"""The compiler's options for a mesh, and its cache on disk.

It uses JAX's own cache, in a folder or in an object store, to which process 0 writes. Its errors never end a run. A
folder that cannot be used is ignored. A store that fails is not used again before the next start. A damaged entry (of
a killed process or a full disk) is deleted, and its program is compiled again.

Compiled programs are machine code: anyone with write access to the cache can run code on the hosts.

The defaults make collectives asynchronous for which the TPU compiler otherwise waits. All programs of a run get them:
steps, rounds, evaluations, the initial state, conversions between methods, and sampling.
"""

import hashlib
import os
import platform
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import truediv
from pathlib import Path

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.atomic_files import remove_oldest, user_cache
from gregale.data.sources.base import expand
from gregale.distributed.config import AUTO
from gregale.errors import UserError
from gregale.model.config import CompilerOptions
from gregale.storage import EXTRAS, ObjectPath, RetryPolicy, StoragePath, is_url, names, storage_path
from gregale.streams import say

MAX_BYTES = 1 << 30  # of all programs together; the least recently used programs are deleted first
FOLDER = "jax_compilation_cache_dir"  # JAX's name of the setting
ENTRY = "-cache"  # how JAX ends the names of its files
STORE_RETRIES = RetryPolicy(seconds=10, silence_seconds=10)  # short, because a start can compile the programs itself


@dataclass(frozen=True)
class CachePath(ObjectPath):
    """A folder or an entry of the cache in a store, as JAX opens it."""

    retry_policy: RetryPolicy = field(default_factory=lambda: STORE_RETRIES, repr=False, compare=False)

    def joinpath(self, *names: str) -> "CachePath":
        return reduce(truediv, names, self)


_TROUBLE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")
_PROCESSOR = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def keep_compiled(location: str | None) -> None:
    """Set up the cache of compiled programs; call this before anything is compiled.

    - `location`: `compilation_cache` of a configuration: a folder; `auto` for `gregale` in the user's cache directory;
      the URL of a folder in a store, with that directory as a fallback; None for no cache

    A folder that JAX already has, for example from JAX_COMPILATION_CACHE_DIR, stays.
    """
    if location is None or getattr(jax.config, FOLDER) is not None:
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        is_own = location == AUTO or is_url(location)
        base = user_cache() if is_own else Path(expand(location, "compilation_cache")).absolute()
        folder = base / f"compiled-{processor()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another owner of the folder could make this process run any code.
        if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            return
        remove_oldest(base.glob(f"compiled-*/*{ENTRY}"), MAX_BYTES, MAX_BYTES)  # JAX's limit takes a lock a program
        jax.config.update(FOLDER, str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # XLA aborts if it cannot write its caches
        if not is_url(location):
            delete_damaged_entries(folder, folder)
            return
        epath.register_path_cls([f"{scheme}://" for scheme in EXTRAS])(CachePath)
        try:
            names(parent := storage_path(location, STORE_RETRIES))
        except UserError as error:
            use_local_folder(folder, error)
            return
        jax.config.update(FOLDER, str(parent / folder.name))
        delete_damaged_entries(parent / folder.name, folder)


def use_local_folder(folder: Path, error: Exception) -> None:
    """Make JAX use this host's folder instead of a store that failed, and log the reason."""
    message = f"compilation_cache: {error} Until the next start, compiled programs are kept in {folder} alone."
    say(f"gregale: {message}", sys.stderr, flush=True)
    jax.config.update(FOLDER, str(folder))
    compilation_cache.reset_cache()


def processor() -> str:
    """Return a hash of the processor's features: a program with unknown instructions would crash the process."""
    with suppress(OSError):
        if found := _PROCESSOR.search(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return hashlib.sha256(f"{platform.machine()} {found[1]}".encode()).hexdigest()[:24]
    return hashlib.sha256(platform.machine().encode()).hexdigest()[:24]


def delete_damaged_entries(path: StoragePath, folder: Path) -> None:
    """Delete an entry when JAX warns that it cannot read or write it, and hide the warning.

    JAX then compiles the program. It would neither overwrite the damaged entry nor stop reading it in later starts.

    - `path`: the folder of the entries
    - `folder`: the fallback if `path` is in a store that fails
    """
    show = warnings.showwarning

    def delete_entry(message, category, filename, lineno, file=None, line=None) -> None:
        if (trouble := _TROUBLE.match(str(message))) is None:
            show(message, category, filename, lineno, file, line)
            return
        with suppress(OSError):
            try:
                for name in names(path):
                    if name.startswith(f"{trouble[1]}-") and name.endswith(ENTRY):
                        (path / name).unlink(missing_ok=True)
            except UserError as error:
                if getattr(jax.config, FOLDER) == str(path):
                    use_local_folder(folder, error)

    warnings.filterwarnings("always", message=_TROUBLE.pattern)
    warnings.showwarning = delete_entry


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
_ASYNC_SUMS = ("xla_enable_async_all_reduce", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce", _PIPELINED_SUMS)
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
# computed. Other options that are advised for GPUs are now the compiler's defaults, or slow it down:
# docs/results/gpu_options.md.
GPU_DEFAULTS: CompilerOptions = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
GPUS = "NVIDIA "

PLATFORMS = ("cpu", "gpu", "tpu")


def compiler_options(given: CompilerOptions, mesh: Mesh, pipelines_sums: bool = True) -> CompilerOptions | None:
    """Return the options for the devices of a mesh; `given` options override the defaults. None if there are none.

    Options of another platform (`xla_tpu_...` on a CPU) are ignored, so that a run can be sampled elsewhere.

    - `pipelines_sums`: sums of gradients may be pipelined by a layer. Those of experts do not fit in a TPU's vector
      memory: the compiler rejects the program. Over the loop in which layers compute the largest logits of attention it
      ends itself. Without that it sums and scatters most of them in one step.
    """
    device = mesh.devices.flat[0]
    kind = getattr(device, "device_kind", "")
    defaults = GPU_DEFAULTS if kind.startswith(GPUS) else DEFAULTS.get(kind, {})
    others = tuple(f"xla_{platform}_" for platform in PLATFORMS if platform != device.platform)
    own = {name: value for name, value in given.items() if not name.startswith(others)}
    if not pipelines_sums and _PIPELINED_SUMS in defaults:
        defaults = {**defaults, _PIPELINED_SUMS: False}
    return {**defaults, **own} or None


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
