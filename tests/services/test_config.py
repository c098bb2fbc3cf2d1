"""The configuration of a run: its mistakes, its way through YAML, and which of its fields a run may change."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest

from gregale.codecs.config import ReduceConfig
from gregale.data.sources import TextSource
from gregale.errors import UserError
from gregale.methods.config import SyncConfig
from gregale.model.config import ComputeConfig, LlamaConfig
from gregale.optim.config import AdamWConfig, OptimizerConfig
from gregale.services.config import (
    MAY_CHANGE,
    BatchConfig,
    DistributedConfig,
    EvaluationConfig,
    SamplesConfig,
    TrainConfig,
    incompatible_changes,
)
from gregale.services.fields import entries
from gregale.services.parsing import dump, load

BASE = TrainConfig("a", 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig("", 1), "name is ''; it names a directory"),
        (lambda: TrainConfig("a/b", 1), "name is 'a/b'"),
        (lambda: TrainConfig(".a", 1), "name is '.a'"),
        (lambda: TrainConfig("a", 0), "steps is 0; it has to be at least 1."),
        (lambda: TrainConfig("a", 1, cpu_devices=0), "cpu_devices is 0"),
        (lambda: TrainConfig("a", 1, log_every=0), "log_every is 0"),
        (lambda: TrainConfig("a", 1, max_skipped=0), "max_skipped is 0"),
        (lambda: BatchConfig(size=0), "batch.size is 0"),
        (lambda: BatchConfig(sequence_length=-1), "batch.sequence_length is -1"),
        (lambda: BatchConfig(microbatches=0), "batch.microbatches is 0"),
        (lambda: EvaluationConfig(every=0), "evaluation.every is 0"),
        (lambda: EvaluationConfig(batches=0), "evaluation.batches is 0"),
        (lambda: DistributedConfig(processes=0), "distributed.processes is 0; it has to be at least 1."),
        (lambda: DistributedConfig("a:1", 2, 2), "distributed.process is 2; the 2 processes have the numbers 0 to 1."),
        (lambda: DistributedConfig("here"), "distributed.coordinator is 'here'; it has to be HOST:PORT"),
        (lambda: SamplesConfig(tokens=0), "samples.tokens is 0"),
        (lambda: SamplesConfig(temperature=-0.5), "samples.temperature is -0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_names_its_key(make, message):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"evaluation": EvaluationConfig(every=5)}, "evaluation.every is 5, but there is no text to evaluate on"),
        ({"evaluation": EvaluationConfig(bigram=True)}, "evaluation.bigram is true, but there is no text"),
        ({"reduce": ReduceConfig(codec="int8", measure=True)}, "reduce.measure is true, but there is no text"),
    ],
)
def test_an_evaluation_needs_text(asked, message):
    nothing = replace(BASE.data, held_out=0.0)
    with pytest.raises(UserError, match=message):
        replace(BASE, data=nothing, **asked)
    replace(BASE, data=nothing)
    replace(BASE, data=replace(nothing, validation={"news": TextSource()}), **asked)


def test_every_key_says_what_it_means():
    assert [entry.key for entry in entries(TrainConfig) if not entry.help] == []


def test_every_choice_comes_back_from_yaml(tmp_path):
    configs = [BASE]
    configs += [replace(BASE, optimizer=choice()) for choice in OptimizerConfig.get_known_choices().values()]
    configs += [replace(BASE, sync=choice()) for choice in SyncConfig.get_known_choices().values()]
    configs.append(replace(BASE, samples=SamplesConfig(["a: b", ""]), evaluation=EvaluationConfig(every=3)))
    for config in configs:
        (tmp_path / "config.yaml").write_text(dump(config))
        assert load(TrainConfig, tmp_path / "config.yaml") == config


def test_what_may_change_is_no_incompatible_change():
    changed = replace(
        BASE,
        steps=20,
        runs="elsewhere",
        cpu_devices=4,
        mesh=replace(BASE.mesh, replica=2),
        compute=ComputeConfig(remat="none"),
        batch=BatchConfig(microbatches=2),
        data=replace(BASE.data, cache="other", workers=3, validation={"news": TextSource()}),
        evaluation=EvaluationConfig(every=5),
        samples=SamplesConfig(["a"]),
        distributed=DistributedConfig("host:1", 2, 1),
    )
    assert incompatible_changes(BASE, changed) == []


def test_everything_else_is_named_with_both_values():
    changed = replace(
        BASE,
        seed=1,
        model=LlamaConfig(layers=2, mlp=64),
        batch=BatchConfig(size=32, microbatches=8),
        optimizer=AdamWConfig(betas=(0.8, 0.9)),
        data=replace(BASE.data, held_out=0.1),
    )
    assert incompatible_changes(BASE, changed) == [
        "seed: 0 -> 1",
        "model.layers: 12 -> 2",
        "model.mlp: 2048 -> 64",
        "data.held_out: 0.02 -> 0.1",
        "batch.size: 64 -> 32",
        "optimizer.betas: (0.9, 0.95) -> (0.8, 0.9)",
    ]


def test_another_choice_and_another_source_are_named():
    lion = OptimizerConfig.get_known_choices()["lion"]()
    (change,) = incompatible_changes(BASE, replace(BASE, optimizer=lion))
    assert change.startswith("optimizer: AdamWConfig(")
    assert "-> LionConfig(" in change
    text = load(TrainConfig, None, ["--name", "a", "--steps", "10", "--data.sources.b", "{type: text, files: [x]}"])
    (change,) = incompatible_changes(BASE, text)
    assert change.startswith("data.sources.b: None -> TextSource(")


def test_the_fields_that_may_change_exist():
    for key in MAY_CHANGE:
        kind = TrainConfig
        for name in key.split("."):
            field = next((each for each in fields(kind) if each.name == name), None)
            assert field is not None, key
            kind = type(getattr(BASE, name, None)) if is_dataclass(getattr(BASE, name, None)) else kind
