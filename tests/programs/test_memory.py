"""A step is compared with the free memory before it runs, and sizes that are left out are small on CPU devices."""

import re
import resource
from functools import partial

import jax
import pytest
import yaml
from rich.filesize import decimal

from gregale.errors import UserError
from gregale.model.config import LlamaConfig
from gregale.programs.plan import command as plan
from gregale.programs.runtime import memory
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.default_sizes import with_default_sizes
from gregale.runs.parsing import load
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


@pytest.fixture
def three_keys(tmp_path):
    """`three_keys(key=value)`: the smallest configuration, and what it says beside."""

    def made(**others) -> TrainConfig:
        path = tmp_path / "three.yaml"
        sources = {"words": {"type": "text", "files": ["text/*.txt"]}}
        path.write_text(yaml.safe_dump({"name": "three", "steps": 3, "data": {"sources": sources}, **others}))
        return load(TrainConfig, path)

    return made


def test_sizes_that_are_left_out_are_small_on_cpu_devices(three_keys, tmp_path):
    small, note = with_default_sizes(three_keys(), "cpu")
    assert (small.model, small.batch) == (LlamaConfig(layers=4, hidden=256, heads=4, mlp=704), BatchConfig(16, 256))
    assert note == (
        "The configuration leaves out model and batch: CPU devices have smaller defaults: model.layers 12 -> 4; "
        "model.hidden 768 -> 256; model.heads 12 -> 4; model.mlp 2048 -> 704; batch.size 64 -> 16; "
        "batch.sequence_length 1024 -> 256."
    )
    assert with_default_sizes(three_keys(), "gpu") == (three_keys(), None)
    given = three_keys(model={"layers": 12}, batch={"microbatches": 2})
    assert with_default_sizes(given, "cpu") == (given, None), "what is given, even in part or as the default, stays"
    tuned = with_default_sizes(three_keys(start_from="runs/other"), "cpu")[0]
    assert (tuned.model, tuned.batch.size) == (LlamaConfig(), 16), "the model is that of the other run"
    for begun, kept in ((small, small), (three_keys(), three_keys())):
        run = RunDirectory(tmp_path / "three")
        run.write_config(begun)
        run.note_checkpoint(1)
        for platform in ("cpu", "gpu"):
            assert with_default_sizes(three_keys(), platform, run)[0] == kept, "a run keeps what it was begun with"


def test_plan_and_train_have_the_same_sizes(three_keys, tmp_path, gregale, has_free, monkeypatch, capsys):
    sized, note = with_default_sizes(three_keys(cpu_devices=8), "cpu")

    def plan_step(config, *_):
        assert config == sized
        raise UserError("planned")

    monkeypatch.setattr(plan, "plan_step", plan_step)
    assert gregale("plan", tmp_path / "three.yaml") == 2
    assert capsys.readouterr().err == "gregale: error: planned\n"
    has_free(0)
    assert gregale("train", tmp_path / "three.yaml") == 2
    assert note in capsys.readouterr().out.splitlines()
