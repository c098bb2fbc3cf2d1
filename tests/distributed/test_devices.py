"""What a process does with its devices: flags, memory, its end with its parent, and the way to JAX's coordinator."""

import os
import platform
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from unittest.mock import Mock

import jax
import pytest
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

from gregale.atomic_files import is_process_dead
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import (
    COLLECTIVE_TIMEOUT,
    WITHOUT_PARALLEL_LOOPS,
    WITHOUT_YNN,
    WITHOUT_YNN_BEFORE,
    by_cluster,
    keep_memory,
    simulate,
    start_devices,
    start_proxy,
    with_flags,
)
from gregale.errors import UserError
from tests.waiting import until


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


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt's parameters")

# Touches 64 MB and gives them back, over and over, and prints the page faults of the last time; what was kept cannot
# be undone, so this is a process of its own.
TOUCHES = """
import ctypes, resource, sys
from gregale.distributed.devices import keep_memory

if sys.argv[1] == "kept":
    assert keep_memory()
libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype = ctypes.c_void_p
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    command = [sys.executable, "-c", TOUCHES, way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@glibc
def test_what_is_freed_is_used_again_without_a_page_fault():
    assert faults("kept") < 10
    assert faults("given back") > 10, "one for a page of 2 MB, if pages are large"


def test_a_users_own_setting_and_other_c_libraries_are_left_alone(monkeypatch):
    """musl knows no such name (OSError), macOS no such parameter (ValueError)."""
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"):
        assert not keep_memory({name: "1"})
    for answer in ({"side_effect": OSError}, {"side_effect": ValueError}, {"return_value": None}):
        monkeypatch.setattr("os.confstr", Mock(**answer))
        assert not keep_memory({})


CHILD = """
import os, sys, time
from gregale.distributed.devices import end_with_parent
end_with_parent(9, int(sys.argv[1]) or None)
print("here", os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid() if sys.argv[2] == "named" else 0)])
time.sleep(60)
"""


@pytest.mark.parametrize("named", ["named", "not named"])
def test_it_ends_when_its_parent_is_killed(named):
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, named], stdout=subprocess.PIPE, text=True) as parent:
        word, number = parent.stdout.readline().split()
        assert word == "here"
        assert not is_process_dead(int(number))
        parent.kill()
        until(lambda: is_process_dead(int(number)))


def test_it_ends_at_once_if_its_parent_is_gone_already():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run([sys.executable, "-c", CHILD, str(gone.pid)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def accepted(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(20)
    return connection


def says_nothing(client: socket.socket) -> bool:
    """Whether a connection is open, and nothing comes."""
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    return True


def test_connections_carry_both_ways_and_stay_open_when_the_coordinator_is_gone():
    """JAX ends its process as soon as the connection closes, and sends signs of life meanwhile."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, _, local = start_proxy(f"127.0.0.1:{coordinator.getsockname()[1]}").rpartition(":")
        accepted(coordinator).close()  # who looks whether it is there

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(local)), 20))

        short, short_end = connected(), accepted(coordinator)
        short.sendall(b"question")
        assert short_end.recv(100) == b"question"
        short_end.sendall(b"answer")
        assert short.recv(100) == b"answer"
        short.close()
        assert short_end.recv(100) == b""

        ours, theirs = connected(), accepted(coordinator)
        coordinator.close()
        theirs.close()
        for _ in range(2):
            ours.sendall(b"x" * 100_000)
            assert says_nothing(ours)
        assert all(says_nothing(each) for each in (connected(), connected(), ours)), "also ones that come then"
