"""Processes compare their settings over real sockets, the others of which are played by this test."""

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import pytest

from gregale.distributed import devices
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import environment_terms, source_digest, version_terms
from gregale.distributed.liveness import EXIT_CODE, Peer
from gregale.distributed.rendezvous import agree, difference, to_text
from gregale.errors import UserError
from gregale.programs.island.stages import MUST_AGREE
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import MAY_DIFFER, matches, process_terms
from gregale.settings.decoding import entries
from gregale.tracking.trackers import WandbConfig

CONFIG = TrainConfig("tiny", 4)

OWN = {**version_terms(), **process_terms(CONFIG)}


@pytest.fixture
def meet() -> Iterator[Callable[[int], tuple[Future[None], Peer]]]:
    """`meet(number)`: process `number` compares its settings in a thread; the process at the other end."""
    with ThreadPoolExecutor(1) as threads:
        ours, theirs = socket.socketpair()

        def start(number: int) -> tuple[Future[None], Peer]:
            config = DistributedConfig("127.0.0.1:1", 2, number, timeout_seconds=20.0)
            peer = Peer(ours, f"process {1 - number} (there, pid 7)", time.monotonic())
            other = Peer(theirs, "", time.monotonic())
            other.connection.settimeout(20.0)
            return threads.submit(agree, [peer], config, OWN), other

        yield start
        for connection in (ours, theirs):
            connection.close()


def test_process_0_tells_the_others_that_all_agree_and_hears_what_comes_next(meet):
    call, other = meet(0)
    other.send(f"settings {to_text(OWN)}\nalive 1")
    call.result(20)
    assert other.next_line() == "agreed "


@pytest.mark.parametrize(("key", "value"), [("the digest of Gregale's source", "0"), ("steps", "5")])
def test_process_0_tells_the_others_what_differs(meet, key, value):
    call, other = meet(0)
    other.send(f"settings {to_text(OWN | {key: value})}")
    with pytest.raises(UserError) as refused:
        call.result(20)
    assert f"{key} is {OWN[key]} in process 0 (" in str(refused.value)
    assert f"), but {value} in process 1 (there, pid 7). All processes of a run need" in str(refused.value)
    assert other.next_line() == f"no {refused.value}"


def test_the_others_end_with_what_process_0_tells_them(meet):
    call, other = meet(1)
    assert (other.next_line() or "").startswith('settings {"the version of Gregale":')
    other.send("no seed is another")
    with pytest.raises(UserError, match=r"^seed is another$"):
        call.result(20)


@pytest.mark.parametrize("number", [0, 1])
def test_one_whose_version_does_not_compare_settings_is_named(meet, number):
    call, other = meet(number)
    other.send("alive 0 0")
    with pytest.raises(UserError, match=rf"^process {1 - number} \(there, pid 7\) runs another version of Gregale"):
        call.result(20)


def test_one_that_goes_while_settings_are_compared_is_lost(meet, capfd):
    call, other = meet(0)
    other.connection.close()
    with pytest.raises(SystemExit) as ended:
        call.result(20)
    assert ended.value.code == EXIT_CODE
    assert "process 1 (there, pid 7) was lost while" in capfd.readouterr().err


def test_what_belongs_to_a_host_may_differ():
    there = DistributedConfig("10.0.0.1:1", 2, 1, token_file="there")
    other = dataclasses.replace(CONFIG, compilation_cache=None, trackers=[WandbConfig()], distributed=there)
    here = dataclasses.replace(CONFIG, distributed=DistributedConfig("10.0.0.2:1", 2, 0))
    assert process_terms(here) == process_terms(other)


def test_values_of_jax_and_flags_are_compared_but_for_those_of_a_host(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_extra_cache=/here --xla_dump_to=/here  --xla_cpu_enable_fast_math")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    before = environment_terms()
    flags = {
        "XLA_FLAGS --xla_cpu_enable_fast_math": "true",
        "LIBTPU_INIT_ARGS --xla_tpu_scoped_vmem_limit_kib": "65536",
    }
    assert {name: value for name, value in before.items() if " " in name} == flags
    assert not {"jax_compilation_cache_dir", "jax_cuda_visible_devices", "jax_logging_level"} & before.keys()
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        text = difference({"a": before, "b": environment_terms()})
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert text == "jax_default_matmul_precision is null in a, but highest in b"


def test_every_pattern_is_of_a_key():
    keys = {"data.sources", "adapter", *(entry.key.replace("<name>", "words") for entry in entries(TrainConfig))}
    keys |= {key.replace("sources", "validation") for key in keys}
    keys |= {key.partition(".0.")[0] for key in keys}
    assert [pattern for pattern in (*MAY_DIFFER, *MUST_AGREE) if not any(matches(key, [pattern]) for key in keys)] == []


def test_two_checkouts_of_one_version_are_told_apart(tmp_path, monkeypatch):
    digests = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "module.py").write_text(text)
        monkeypatch.setattr(devices, "__file__", str(tmp_path / "distributed" / "settings_check.py"))
        devices.source_digest.cache_clear()
        digests.add(source_digest())
    devices.source_digest.cache_clear()
    assert len(digests) == 2
