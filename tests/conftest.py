"""Every test sees eight simulated CPU devices; the flags have to be set before JAX starts."""

import os

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling takes most of the suite's time; these three leave partitioning alone and take most of that.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    # On a busy machine the threads of eight simulated devices can be minutes apart.
    "--xla_cpu_collective_call_terminate_timeout_seconds=120",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of the simulated devices: with as few as there are devices, those that wait in a collective of the next step
# can leave none for a device that is still in the last one.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch) -> None:
    """Tables and help have the width for files, also where something (readline, in xdist's workers) says otherwise."""
    monkeypatch.delenv("COLUMNS", raising=False)
