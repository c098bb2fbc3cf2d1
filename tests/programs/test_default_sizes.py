"""What a configuration leaves out of `model` and `batch`: sizes for CPU devices, and the model to start from."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import pytest
import yaml

from gregale.axes.layout import make_mesh
from gregale.errors import UserError
from gregale.model.config import YarnScaling
from gregale.model.llama import GemmaConfig, LlamaConfig
from gregale.model.parametrisation import CompletePConfig
from gregale.programs.plan import command as plan
from gregale.programs.runtime import memory
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.default_sizes import (
    with_default_sizes,
    with_model_of,
    with_origin_model,
    with_what_is_left_out,
)
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.parsing import load
from gregale.runs.run_directory import RunDirectory

THREE_KEYS = {"name": "three", "steps": 3, "data": {"sources": {"words": {"type": "text", "files": ["text/*.txt"]}}}}
SMALL = LlamaConfig(layers=4, hidden=256, heads=4, mlp=704)


def three_keys(**others: Any) -> TrainConfig:
    return load(TrainConfig, {**THREE_KEYS, **others})


def sized(config: TrainConfig, devices: int = 1, begun: TrainConfig | None = None) -> TrainConfig:
    return with_default_sizes(config, jax.devices()[:devices], lambda _: 257, begun)[0]


def test_sizes_that_are_left_out_are_small_on_cpu_devices():
    small, note = with_default_sizes(three_keys(), jax.devices()[:1], lambda _: 257)
    assert (small.model, small.batch) == (SMALL, BatchConfig(16, 256))
    assert note == (
        "CPU devices have smaller defaults of sizes that the configuration leaves out: model.layers 12 -> 4; "
        "model.hidden 768 -> 256; model.heads 12 -> 4; model.mlp 2048 -> 704; batch.size 64 -> 16; "
        "batch.sequence_length 1024 -> 256."
    )
    described = [type("Device", (), {"platform": "gpu"})]
    assert with_default_sizes(three_keys(), described, lambda _: 257) == (three_keys(), None)


@pytest.mark.parametrize(
    ("given", "model", "batch"),
    [
        ({"batch": {"microbatches": 2}}, SMALL, BatchConfig(16, 256, 2)),
        ({"batch": {"size": 64, "sequence_length": 64}}, SMALL, BatchConfig(64, 64)),
        ({"model": {"layers": 12}}, replace(SMALL, layers=12), BatchConfig(16, 256)),
        ({"model": {"tied_head": True}}, replace(SMALL, tied_head=True), BatchConfig(16, 256)),
        ({"model": {"hidden": 384}}, LlamaConfig(layers=4, hidden=384), BatchConfig(16, 256)),
        ({"model": {"kv_heads": 3}}, LlamaConfig(layers=4, kv_heads=3), BatchConfig(16, 256)),
        ({"model": {"full_layers": [9], "sliding_window": 8}}, None, BatchConfig(16, 256)),
        ({"model": {"type": "gemma"}}, GemmaConfig(), BatchConfig(16, 256)),
        ({"model": {"type": "llama"}}, SMALL, BatchConfig(16, 256)),
    ],
)
def test_each_key_that_is_given_stays(given, model, batch):
    """Widths belong together, and a model for which the small sizes are invalid keeps the usual ones."""
    found = sized(three_keys(**given))
    assert (found.model, found.batch) == (model or three_keys(**given).model, batch)


def test_a_batch_is_rounded_up_to_what_devices_and_microbatches_share():
    assert sized(three_keys(), devices=6).batch.size == 18
    assert sized(three_keys(batch={"microbatches": 4}), devices=8).batch.size == 32
    grown = three_keys(stages=[{"from": 1, "batch": {"microbatches": 5}}])
    assert sized(grown, devices=2).batch.size == 20
    assert sized(three_keys(batch={"size": 64}), devices=6).batch.size == 64, "a size that is given stays"


SYNCS = [{}, {"sync": {"type": "streaming_diloco", "fragments": 8}}, {"sync": {"type": "diloco"}}]


@pytest.mark.parametrize(("devices", "batch"), [(3, {"size": 36}), (6, {"size": 36}), (8, {})])
def test_what_works_with_the_usual_sizes_works_with_those_of_cpu_devices(devices, batch):
    def works(config: TrainConfig) -> bool:
        try:
            return bool(set_up(config, 257, make_mesh(config.mesh, jax.devices()[:devices])))
        except UserError:
            return False

    tried = []
    for model, stage, replica, sync in product((1, 2), (1, 2, 3, 6), (1, 2), SYNCS):
        if devices % (model * stage * replica) == 0 and (replica > 1 or not sync):
            pipeline = {"pipeline": {"repeats": 1}} if stage > 1 else {}
            mesh = {"model": model, "stage": stage, "replica": replica}
            config = three_keys(mesh=mesh, batch=batch, **sync, **pipeline)
            tried += [(works(config), works(sized(config, devices)))]
    assert (True, True) in tried
    assert (True, False) not in tried


def test_a_model_whose_small_sizes_do_not_suit_the_mesh_keeps_its_own():
    config = three_keys(mesh={"stage": 3}, pipeline={"repeats": 1})
    found, note = with_default_sizes(config, jax.devices()[:3], lambda _: 257)
    assert (found.model, found.batch.size) == (LlamaConfig(), 18)
    assert note is not None
    assert note.endswith("The small `model` does not suit this mesh or method: its usual defaults stay.")


def test_a_run_keeps_the_sizes_that_it_was_begun_with():
    for begun in (three_keys(), sized(three_keys()), sized(three_keys(), devices=6)):
        found = sized(three_keys(), devices=8, begun=begun)
        assert (found.model, found.batch) == (begun.model, begun.batch)
    given = three_keys(batch={"size": 8})
    assert sized(given, begun=three_keys(batch={"size": 12})).batch.size == 8


THEIRS = GemmaConfig(layers=2, hidden=64, heads=2, mlp=96, parametrisation=CompletePConfig(base_hidden=32))


def test_the_model_to_start_from_has_the_keys_that_are_left_out(tmp_path):
    origin = RunDirectory(tmp_path / "origin")
    origin.path.mkdir()
    origin.write_config(replace(three_keys(), model=THEIRS))
    start = partial(three_keys, start_from=str(origin.path))
    found, note = with_origin_model(start())
    assert found.model == replace(THEIRS, parametrisation=None), "rates are the run's own"
    assert sized(found).model == found.model
    assert note
    assert note.startswith(f"The configuration leaves out keys of `model`, which are those of {origin.path}: model.ty")
    longer = {"rotary_scaling": {"type": "yarn", "factor": 16, "original_context": 64}}
    scaled, _ = with_origin_model(start(model=longer))
    assert isinstance(scaled.model, GemmaConfig)
    assert (scaled.model.hidden, type(scaled.model.rotary_scaling)) == (64, YarnScaling)
    other = start(model={"type": "llama"})
    assert with_origin_model(other)[0] == other, "another type is refused later"


def test_one_key_of_the_experts_of_the_model_to_start_from_can_be_given():
    experts = {"count": 6, "active": 3, "balance": {"bias": True}}
    theirs = three_keys(model={"experts": experts}).model
    found = with_model_of(three_keys(model={"experts": {"balance": {"bias_rate": 0}}}), theirs, is_new=True)
    assert isinstance(found.model, LlamaConfig)
    assert found.model.experts
    assert (found.model.experts.count, found.model.experts.balance.bias) == (6, True)
    assert found.model.experts.balance.bias_rate == 0


@pytest.fixture
def written(inputs):
    """`written(key=value)`: the path of the smallest configuration, and what it says beside."""

    def made(**others: Any):
        (inputs / "three.yaml").write_text(yaml.safe_dump({**THREE_KEYS, **others}))
        return inputs / "three.yaml"

    return made


@pytest.fixture
def planned(gregale, monkeypatch):
    """`planned(path)`: the configuration that `gregale plan` compiles."""

    def configuration(path) -> TrainConfig:
        found = []

        def plan_step(config, *_):
            found.append(config)
            raise UserError("planned")

        monkeypatch.setattr(plan, "plan_step", plan_step)
        assert gregale("plan", path) == 2
        return found[0]

    return configuration


def test_plan_and_train_have_the_same_sizes(written, planned, gregale, monkeypatch, capsys):
    config = three_keys(cpu_devices=8)
    assert planned(written(cpu_devices=8)) == sized(config, devices=8)
    note = capsys.readouterr().err.splitlines()[0]
    assert note.startswith("CPU devices have smaller defaults")
    monkeypatch.setattr(memory, "free_bytes", lambda device: [(0, "this machine has free")])
    assert gregale("train", written(cpu_devices=8)) == 2
    assert note in capsys.readouterr().out.splitlines()


def test_a_plan_of_an_open_mesh_is_for_the_fewest_devices_and_says_so(written, planned, capsys):
    assert planned(written(mesh={"replica": 2})).mesh == three_keys(mesh={"replica": 2}).mesh
    assert (
        "mesh.data is -1, so the number of devices is open: this plan is for the fewest, 2, and for sizes of acc"
        in (capsys.readouterr().err)
    )


def test_a_plan_has_the_model_to_start_from(written, planned, refused, inputs):
    origin = RunDirectory(inputs / "runs" / "origin")
    origin.path.mkdir(parents=True)
    origin.write_config(replace(three_keys(), model=THEIRS))
    assert isinstance(planned(written(start_from="origin", cpu_devices=8)).model, GemmaConfig)
    elsewhere = written(start_from="elsewhere", model={"hidden": 384}, cpu_devices=8)
    assert planned(elsewhere).model == LlamaConfig(layers=4, hidden=384)
    assert "elsewhere is not a run directory" in refused("plan", written(start_from="elsewhere"))


def test_a_run_that_goes_on_and_a_branch_have_the_model_and_the_sizes_of_their_checkpoint(tmp_path):
    origin, run = RunDirectory(tmp_path / "origin"), RunDirectory(tmp_path / "three")
    for each in (origin, run):
        each.path.mkdir()
    origin.write_config(replace(three_keys(), model=THEIRS, batch=BatchConfig(24, 128)))
    config = three_keys(start_from=str(origin.path))
    branch, _ = with_what_is_left_out(config, origin, origin)
    assert (branch.model, branch.batch) == (THEIRS, BatchConfig(24, 128))
    tuned, _ = with_what_is_left_out(config, None, origin)
    assert (tuned.model, tuned.batch) == (replace(THEIRS, parametrisation=None), BatchConfig(16, 256))
    run.write_config(tuned)
    assert with_what_is_left_out(config, run, None)[0] == tuned, "it needs no origin"


def test_tokenize_has_the_length_of_cpu_devices(printed, written):
    assert " rows of 256, " in printed("tokenize", written())
