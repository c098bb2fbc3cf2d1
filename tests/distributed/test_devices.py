"""The flags that XLA gets for CPU devices, and the memory that JAX takes of a GPU."""

import os

import jax
import pytest
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import (
    COLLECTIVE_TIMEOUT,
    WITHOUT_PARALLEL_LOOPS,
    WITHOUT_YNN,
    WITHOUT_YNN_BEFORE,
    by_cluster,
    simulate,
    start_devices,
    with_flags,
)
from gregale.errors import UserError


def test_flags_are_added_and_a_users_own_stand():
    assert with_flags("", 1).split() == [COLLECTIVE_TIMEOUT, WITHOUT_YNN]
    own = f"--xla_dump_to=here {WITHOUT_YNN}dot"
    assert with_flags(own, 1).split() == [*own.split(), COLLECTIVE_TIMEOUT]
    assert with_flags(with_flags(own, 1), 1) == with_flags(own, 1)


def test_a_version_that_may_not_know_a_flag_does_not_get_it(monkeypatch: pytest.MonkeyPatch):
    assert jax.__version_info__ < WITHOUT_YNN_BEFORE, (
        "does it know the flag, and is it still of use? Then raise the bound"
    )
    monkeypatch.setattr(jax, "__version_info__", WITHOUT_YNN_BEFORE)
    assert with_flags("", 1) == COLLECTIVE_TIMEOUT


@pytest.mark.parametrize(("devices", "processors", "whole"), [(1, 1, False), (4, 8, False), (8, 8, True), (8, 2, True)])
def test_loops_are_whole_where_devices_are_as_many_as_processors(monkeypatch, devices, processors, whole):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert (WITHOUT_PARALLEL_LOOPS in with_flags("", devices).split()) == whole


@pytest.mark.parametrize(("devices", "threads", "given", "found"), [(1, None, None, "0.92"), (8, "24", "0.5", "0.5")])
def test_threads_and_memory_are_set_unless_the_environment_has_a_value(monkeypatch, devices, threads, given, found):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given or "")
    if given is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setattr(jax.config, "update", lambda key, value: None)  # JAX has begun
    start_devices(devices, DistributedConfig())
    assert os.environ.get("PJRT_NPROC") == threads, "one device has as many as JAX gives it"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == found


def test_a_process_in_which_jax_has_started_takes_as_many_devices_as_it_has():
    there = jax.device_count()
    for count in (1, there):
        simulate(count)
    with pytest.raises(UserError, match=rf"JAX has started in this process with {there} cpu device\(s\)"):
        simulate(there + 1)


@pytest.mark.parametrize(("own_port", "found"), [(None, "10.0.0.2:8476"), ("9000", "10.0.0.2:9000")])
def test_slices_of_tpus_meet_at_a_port_that_firewalls_leave_open(monkeypatch, own_port, found):
    """JAX's own port, 8482, is closed between slices by the rule that comes with them."""
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    if own_port:
        monkeypatch.setenv("JAX_COORDINATOR_PORT", own_port)
    facts = {"COORDINATOR_ADDRESS": "10.0.0.2:8081", "NUM_SLICES": "2", "SLICE_ID": "1"}
    for name, value in facts.items():
        monkeypatch.setenv(f"MEGASCALE_{name}", value)
    monkeypatch.setattr(GceTpuCluster, "is_env_present", lambda: True)
    monkeypatch.setattr(GceTpuCluster, "_get_worker_list_in_slice", staticmethod(lambda: ["10.0.1.2", "10.0.1.3"]))
    monkeypatch.setattr(GceTpuCluster, "_get_process_id_in_slice", staticmethod(lambda: 1))
    assert by_cluster(DistributedConfig("auto")) == DistributedConfig(found, 4, 3)


def test_slurm_tells_who_is_who(monkeypatch):
    facts = {"JOB_ID": "4711", "STEP_NODELIST": "node[007-009],x", "NTASKS": "12", "PROCID": "5", "LOCALID": "1"}
    for name, value in facts.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    found = by_cluster(DistributedConfig("auto", join_seconds=7))
    assert found == DistributedConfig("node007:62055", 12, 5, join_seconds=7)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "here:1")
    assert by_cluster(DistributedConfig("auto")).coordinator == "here:1"
    for name in (*facts, "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name if name.startswith("JAX") else f"SLURM_{name}")
    with pytest.raises(UserError, match="JAX finds no cluster here"):
        by_cluster(DistributedConfig("auto"))
