"""State and programs are compared with the free memory before the first step."""

import re
import resource
from functools import partial

import jax
import pytest
from rich.filesize import decimal

from gregale.errors import UserError
from gregale.programs.runtime import memory
from gregale.runs.run_directory import RunDirectory


@pytest.fixture
def has_free(monkeypatch):
    return lambda size: monkeypatch.setattr(memory, "free_bytes", lambda device: [(size, "this machine has free")])


def test_a_step_or_a_state_that_does_not_fit_is_refused_before_it_exists(refused, has_free, inputs):
    told = r"takes ([\d.]+ \w+) \(8 devices x ([\d.]+) (\w+)\) beside what exists already, and this machine has free "
    has_free(5000)
    error = refused("train", "tiny.yaml", "--name", "large")
    assert re.search(rf"The memory does not suffice: the state \(.*\) {told}5\.0 kB\. More batch\.microbatches", error)
    has_free(10**6)  # the state has 8 x 63 kB
    error = refused("train", "tiny.yaml", "--name", "large")
    size = r"a program of a step \(batch\.size 8, batch\.sequence_length 32, microbatches 2\)"
    found = re.search(rf"The memory does not suffice: {size} {told}1\.0 MB\.", error)
    assert found, error
    total, each, unit = found.groups()
    assert total == decimal(round(8 * float(each) * {"kB": 1e3, "MB": 1e6}[unit])), "the product is right"
    assert not (inputs / "runs" / "large" / "metrics.jsonl").read_bytes()


def test_all_programs_of_a_run_are_compared_with_the_memory_before_its_first_step(gregale, inputs, monkeypatch):
    checked, metrics = [], inputs / "runs" / "checked" / "metrics.jsonl"

    def check(setup, what, needed):
        assert not metrics.exists() or not metrics.read_bytes()
        checked.append(what.partition(" (")[0])

    monkeypatch.setattr(memory, "check_fits", check)
    outer = ["--sync.type", "diloco", "--sync.period", "3", "--sync.warmup_steps", "1"]
    assert gregale("train", "tiny.yaml", "--name", "checked", "--steps", "4", *outer) == 0
    steps = ["a program of a step"] * 3  # of the warm-up, of DiLoCo, and its synchronisation
    assert checked == [*steps, *["a program of an evaluation"] * 2]


def test_a_stage_that_does_not_fit_is_refused_after_the_one_before_is_saved(refused, inputs, monkeypatch):
    def check(setup, what, needed):
        if setup.config.batch.size == 16 and what.startswith("a program"):
            raise UserError("no memory")

    monkeypatch.setattr(memory, "check_fits", check)
    refused("train", "tiny.yaml", "--name", "grown", "--stages", "[{from: 3, batch: {size: 16}}]")
    assert RunDirectory(inputs / "runs" / "grown").newest_step() == 3


def test_the_limits_of_a_process_and_of_its_containers_count(monkeypatch, tmp_path):
    device = jax.devices()[0]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**40, 2**40))
    found = {limit: free for free, limit in memory.free_bytes(device)}
    assert 0 < found["this machine has free"] < 2**44
    assert 2**39 < found["the limit of this process (ulimit -v) leaves"] < 2**40
    for version, line in (("", "0::/jobs/mine"), ("memory", "4:memory:/jobs/mine")):
        _, limit, used, prefix = memory.CGROUPS[version]
        monkeypatch.setitem(memory.CGROUPS, version, (tmp_path / f"of-{version}", limit, used, prefix))
        folder = tmp_path / f"of-{version}" / "jobs"
        for part, (most, now) in {"": ("9000", 5000), "mine": ("max", 1000)}.items():
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / limit).write_text(f"{most}\n")
            (folder / part / used).write_text(f"{now}\n")
            (folder / part / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file 700\n{prefix}active_file 50\n")
        with monkeypatch.context() as patch:
            read = partial(
                lambda text, read, path: text if "self/cgroup" in str(path) else read(path), line, memory.read
            )
            patch.setattr(memory, "read", read)
            assert min(memory.free_bytes(device)) == (4750, "the limit of this container (cgroup) leaves")
