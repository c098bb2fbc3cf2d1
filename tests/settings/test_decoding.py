"""What a configuration's mistakes are called: the whole key, where it was given, and what was likely meant."""

import pytest

from gregale.cli import main
from gregale.data.sources import SourceConfig
from gregale.errors import Mistakes, UserError
from gregale.methods.config import SyncConfig
from gregale.model.config import ModelConfig
from gregale.optim import OptimizerConfig
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.settings.decoding import (
    MOST_SHOWN,
    choices,
    counterparts,
    entries,
    is_known,
    known_entries,
    names_of,
    projects,
)

RUN = ["--name", "a", "--steps", "100"]
RAW = {"name": "a", "steps": 100}
DILOCO = ["--sync.type", "diloco"]


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        load(TrainConfig, None, [*RUN, *arguments])
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", "0", "steps is 0 (on the command line); it has to be at least 1."),
        ("steps", "1" * 20, "steps is 11111111111111111111 (on the command line); it has to be from 1 to 2,147,"),
        ("optimizer.clip_norm", ".nan", "is nan (on the command line); it has to be above 0, or null: no clipping."),
        ("optimizer.betas", "0.9,1", "optimizer.betas.1 is 1 (on the command line); it has to be at least 0 and below"),
        ("sync.outer.schedule.warmup", "-1", "sync.outer.schedule.warmup is -1 (on the command line);"),
        ("reduce.codec", "int9", "reduce.codec is 'int9' (on the command line). Did you mean `int8` or"),
        ("trackers", "[{type: wandb, mode: offlin}]", "trackers.0.mode is 'offlin' (on the command line). Did"),
        ("model.rotary_scaling.low_frequency_factor", "4", "is 4 (on the command line) and high_frequency_factor is 4"),
        ("name", "x" * 300, "name has 300 bytes (xxxxxxxxxxxxxxxxxxxx...)"),
        ("sync.outer.type", "adamx", "`sync.outer.type` is 'adamx' (on the command line), which is not"),
        ("sync.delay", "1", "`delay` belongs to type streaming_diloco."),
        ("runs", "a\0b", "runs is 'a\\x00b' (on the command line): no path has"),
    ],
)
def test_a_value_out_of_its_range_is_told_with_its_whole_key(key, value, message):
    assert message in refusal(*(DILOCO if key.startswith("sync") else []), f"--{key}", value)


CHOICES = {
    "optimizer.schedule.type": ["constant", "linear", "cosine", "wsd"],
    "sync.type": ["psdp", "diloco", "streaming_diloco"],
    "compute.remat": ["none", "full", "context", "context_offload", "projections", "offload"],
    "data.sources.words.type": ["text", "jsonl", "parquet", "tokens", "huggingface"],
}


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_choice_lists_the_valid_ones(key):
    error = refusal(f"--{key}", "nonsense")
    assert f"{key}" in error
    assert "'nonsense'" in error
    assert all(choice in error.lower().partition("valid choices: ")[2] for choice in CHOICES[key]), error


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("a, b", ["a", "b"]), ("\n", ["\n"]), (" ", [" "]), ("", []), ('["\\n", "a, b"]', ["\n", "a, b"])],
)
def test_a_list_of_texts(typed, meant):
    assert load(TrainConfig, None, [*RUN, "--samples.prompts", typed]).samples.prompts == meant


# Misspelled and foreign names of each section, with the key that is meant; "" where no hint is right.
MEANT = {
    "": {
        "step": "steps",
        "optimiser": "optimizer",
        "checkpoints": "checkpoint",
        "stage": "stages` or `mesh.stage",
        "name_": "name",
        "lr": "optimizer.learning_rate",
        "warmup": "optimizer.schedule.warmup",
        "warmup_steps": "optimizer.schedule.warmup` or `sync.warmup_steps",
        "weight_decay": "optimizer.weight_decay",
        "hidden_size": "model.hidden",
        "layers": "model.layers",
        "experts": "model.experts",
        "attention": "compute.attention",
        "tokenizer": "data.tokenizer",
        "dataset": "data",
        "train_file": "data.sources",
        "num_workers": "data.workers",
        "sequence_length": "batch.sequence_length",
        "optimizer_betas": "optimizer.betas",
        "mesh_replica": "mesh.replica",
        "eval_every": "evaluation.every",
        "lora": "adapter.type",
        "logger": "trackers",
        "period": "sync.period",
        **dict.fromkeys(
            ("dropout", "foo", "device", "x", "loss", "every", "type", "alpha", "interval", "remat"),
            "",
        ),
    },
    "model": {
        "hiden": "model.hidden",
        "hiden_size": "model.hidden",
        "n_layers": "model.layers",
        "norm": "model.norms",
        "qk_layernorm": "model.qk_norm",
        "num_experts": "model.experts.count",
        "max_position_embeddings": "batch.sequence_length",
        "context": "batch.sequence_length",
        "attention": "compute.attention",
        "attention_backend": "compute.attention",
        "dtype": "compute.dtype",
        **dict.fromkeys(("dropout", "attention_dropout", "bias", "lr", "pretrained", "tokenizer", "softcap", "x"), ""),
    },
    "model.experts": {
        "hidden": "model.experts.width",
        "hidden_size": "model.experts.width",
        "intermediate_size": "model.experts.width",
        "num_experts": "model.experts.count",
        "top_k": "model.experts.active",
        "balance_loss": "model.experts.balance.loss",
        "z_loss": "model.experts.balance.z_loss",
        **dict.fromkeys(("dropout", "size", "layers"), ""),
    },
    "model.rotary_scaling": {"factr": "model.rotary_scaling.factor", "theta": ""},
    "mesh": {
        "pipeline": "mesh.stage",
        "pp": "mesh.stage",
        "tensor": "mesh.model",
        "fsdp": "mesh.data",
        "replicas": "mesh.replica",
        "slices": "mesh.replica",
        "sequence": "mesh.context",
        **dict.fromkeys(("expert", "devices", "hosts"), ""),
    },
    "compute": {"bf16": "compute.dtype", "flash_attention": "compute.attention", "fp8": "compute.matmul", "block": ""},
    "pipeline": {"micro_batches": "pipeline.microbatches", "repeat": "pipeline.repeats", "schedule": "", "stages": ""},
    "data": {
        "files": "data.sources",
        "path": "data.sources",
        "vocab_size": "data.tokenizer.vocabulary",
        "tokenizer_path": "data.tokenizer.path",
        "seq_len": "batch.sequence_length",
        "batch_size": "batch.size",
        "shuffel": "data.shuffle",
        **dict.fromkeys(("seed", "dtype", "packing"), ""),
    },
    "data.tokenizer": {"vocab_size": "data.tokenizer.vocabulary", "pretrained": "", "size": ""},
    "data.sources.web": {"file": "data.sources.web.files", "weights": "data.sources.web.weight", "dataset": ""},
    "batch": {"batch_size": "batch.size", "context_length": "batch.sequence_length", "workers": "", "shuffle": ""},
    "optimizer": {
        "learning_rat": "optimizer.learning_rate",
        "warmup": "optimizer.schedule.warmup",
        "scheduler": "optimizer.schedule.type",
        "end_lr": "optimizer.schedule.final",
        "clip_grad": "optimizer.clip_norm",
        **dict.fromkeys(("foo", "dampening", "steps"), ""),
    },
    "optimizer.schedule": {"warm_up": "optimizer.schedule.warmup", "learning_rate": "optimizer.learning_rate", "x": ""},
    "sync": {
        "perod": "sync.period",
        "every": "sync.period",
        "outer_lr": "sync.outer.learning_rate",
        "momentum": "sync.outer.momentum",
        "warmup": "sync.outer.schedule.warmup",
        **dict.fromkeys(("optimizer", "replicas"), ""),
    },
    "sync.outer": {"lr": "sync.outer.learning_rate", "momentun": "sync.outer.momentum"},
    "sync.outer.schedule": {"warmup_steps": "sync.outer.schedule.warmup"},
    "reduce": {"quantization": "reduce.codec", "block_size": "reduce.block", "precision": ""},
    "checkpoint": {"save_every": "checkpoint.every", "keep": "checkpoint.keep_last", "path": "", "export": ""},
    "evaluation": {"interval": "evaluation.every", "num_batches": "evaluation.batches", "steps": "", "data": ""},
    "samples": {"max_tokens": "samples.tokens", "every": "evaluation.every", "top_k": ""},
    "inspect": {"interval": "inspect.every", "layers": ""},
    "adapter": {"lora_r": "adapter.rank", "target_modules": "adapter.targets", "bias": "", "quantization": ""},
    "distributed": {"master_addr": "distributed.coordinator", "rank": "distributed.process", "backend": ""},
    "islands": {"coordinator": "islands.lighthouse", "min_member": "islands.min_members", "port": ""},
    "skip_spikes": {"sigmas": "skip_spikes.sigma", "x": ""},
}
TYPES = {"sync": "diloco", "data.tokenizer": "bpe", "data.sources.web": "text", "model.rotary_scaling": "yarn"}


def nested(section: str, values: dict) -> dict:
    """A configuration with the values in a section, of the type of `TYPES` if the values have none."""
    for depth in range(section.count(".") + 1 if section else 0, 0, -1):
        *above, name = section.split(".")[:depth]
        key = ".".join([*above, name])
        values = {name: {"type": TYPES[key]} | values if key in TYPES else values}
    return values


def mistakes(raw: dict) -> dict[str, str]:
    """The texts of the mistakes of a configuration, by their keys."""
    with pytest.raises(Mistakes) as caught:
        load(TrainConfig, RAW | raw)
    return {each.split("`")[1]: each.partition(" Valid keys ")[0] for each in caught.value.found}


@pytest.mark.parametrize("section", MEANT)
def test_a_hint_names_the_key_that_is_meant_and_no_other(section):
    meant = MEANT[section]
    found, known = mistakes(nested(section, dict.fromkeys(meant, 1))), known_entries(TrainConfig)
    for name, key in meant.items():
        *_, hint = found[f"{section}.{name}".lstrip(".")].partition(". ")
        assert hint == (f"Did you mean `{key}`?" if key else ""), name
        for each in key.replace("`", "").split(" or ") if key else ():
            assert is_known(known, each.replace(".web", ".<name>")), each


def test_every_name_in_other_programs_finds_its_key():
    groups: dict[str, dict[str, str]] = {}
    for entry in known_entries(TrainConfig).values():
        if "<" not in entry.key and ".0" not in entry.key:
            for alias in {*entry.aliases} - {entry.key.rpartition(".")[2]}:
                above, _, name = alias.rpartition(".")
                groups.setdefault(above or entry.key.rpartition(".")[0], {})[name] = entry.key
    for section, aliases in groups.items():
        found = mistakes(nested(section, dict.fromkeys(aliases, 1)))
        for alias, key in aliases.items():
            text = found[f"{section}.{alias}".lstrip(".")]
            assert f"`{key}`" in text, (alias, text)


def test_the_type_in_a_message_is_that_of_the_section():
    registries = {
        "sync": SyncConfig,
        "optimizer": OptimizerConfig,
        "model": ModelConfig,
        "data.sources.web": SourceConfig,
    }
    for section, registry in registries.items():
        for name in choices(registry):
            found = mistakes(nested(section, {"type": name, "nothing_like_it": 1}))
            assert f" is not a valid key under `{section}` with type {name}." in found[f"{section}.nothing_like_it"]


MISTAKEN = """\
name: a
step: 10
mesh: {pipeline: 2, replica: 0}
model:
  droput: 0.1
  experts: {hidden: 3, active: many}
data:
  tokenizer: {type: bpe, vocab_size: 300}
  sources:
    web: {type: csv, fils: [a], weight: -1}
    code: {type: txt}
sync: {type: diloco, perod: 30, outer: {lr: 1, schedule: {type: cosin}}}
optimizer: {groups: [{learning_rate: 1}, {match: "*", rate: 1}]}
reduce: {feedback: {bta: 0.5}}
"""
TOLD = """\
gregale: error: 17 mistakes:
  `step` (run.yaml, line 2) is not a valid key at the top. Did you mean `steps`?
  `mesh.pipeline` (run.yaml, line 3) is not a valid key under `mesh`. Did you mean `mesh.stage`?
  mesh.replica is 0 (run.yaml, line 3); it has to be at least 1 or -1.
  `model.droput` (run.yaml, line 5) is not a valid key under `model` with type llama. Valid keys under `model` with ...
  `model.experts.hidden` (run.yaml, line 6) ... Did you mean `model.experts.width`?
  `model.experts.active` (run.yaml, line 6) is 'many', a str; expected int (experts of a token).
  `data.tokenizer.vocab_size` (run.yaml, line 8) ... Did you mean `data.tokenizer.vocabulary`?
  `data.sources.web.fils` (run.yaml, line 10) ... with type csv. Did you mean `data.sources.web.files`?
  data.sources.web.weight is -1 (run.yaml, line 10); it has to be at least 0.
  `data.sources.code.type` is 'txt' (run.yaml, line 11), ... Did you mean `text`? Valid choices: text, jsonl, ...
  `sync.perod` (run.yaml, line 12) ... with type diloco. Did you mean `sync.period`?
  `sync.outer.lr` (run.yaml, line 12) ... with type sgd. Did you mean `sync.outer.learning_rate`?
  `sync.outer.schedule.type` is 'cosin' (run.yaml, line 12), ... Did you mean `cosine`? Valid choices: ...
  `optimizer.groups.1.rate` (run.yaml, line 13) ... Valid keys under `optimizer.groups.1`: learning_rate, ...
  `reduce.feedback.bta` (run.yaml, line 14) ... Did you mean `reduce.feedback.beta`?
  samples.tokens is -1 (on the command line); it has to be at least 1.
  `batch.sise` (on the command line) ... Valid keys under `batch`: microbatches, sequence_length, size.
"""


def test_mistakes_of_all_levels_are_told_at_once_with_a_line_for_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MISTAKEN)
    assert main(["train", "run.yaml", "--samples.tokens=-1", "--batch.sise=3"]) == 2
    for told, line in zip(TOLD.splitlines(), capsys.readouterr().err.splitlines(), strict=True):
        start, _, end = told.partition(" ... ")
        assert line.startswith(start.removesuffix(" ..."))
        assert end.removesuffix(" ...") in line, line
    with pytest.raises(UserError) as caught:
        load(TrainConfig, "run.yaml")
    assert "\n" not in str(caught.value), "messages that hold it have one line"


def test_the_table_of_other_projects_names_our_keys_and_repeats_no_alias():
    known = known_entries(TrainConfig)
    groups = {key.rpartition(".")[0] for key in known} | {"trackers"}
    for row in counterparts():
        assert row.ours in {"", *known, *groups}, row
        assert row.theirs != row.ours, row
        assert list(projects()).count(row.project) == 1, row
    for entry in entries(TrainConfig):
        assert not set(entry.aliases) & set(names_of(entry.key)), entry.key


def test_a_section_of_another_project_is_translated():
    found = refusal(*(f"--training.{name}=1" for name in ("steps", "seq_len", "enable_cpu_offload", "gc_freq")))
    assert (
        "`training.steps` of torchtitan is `steps` here; `training.seq_len` of torchtitan is `batch.sequence_length` "
        "here; `training.enable_cpu_offload` of torchtitan has no counterpart here."
    ) in found
    found = refusal("--eval_steps", "1")  # of MaxText: batches; of transformers: steps between evaluations
    assert "`eval_steps` of MaxText is `evaluation.batches` here. Did you mean `evaluation.every`?" in found
    found = refusal("--per-device-batch-size", "1")
    assert "` of MaxText is `batch.size` here (times devices times gradient_accumulation_steps)." in found
    for name in ("capacity_factor", "moe_expert_capacity_factor"):
        found = refusal(f"--model.experts.{name}", "1.25")
        assert "`capacity_factor` of MaxText has no counterpart here (no token is dropped, " in found
    trainer = [f"--{row.theirs}=1" for row in counterparts() if row.theirs.startswith("trainer.")]
    assert f"; docs/migration.md has {len(trainer) - MOST_SHOWN} more of these keys." in refusal(*trainer)


@pytest.mark.parametrize(
    ("option", "told"),
    {
        "training.num_tokens_per_train_step": "`batch.size` here (tokens / sequence_length)",
        "training.max_context_length": "`batch.sequence_length` here",
        "trainer.mesh.axes.model": "`mesh.model` here",
        "data.components.web.source.train_urls": "`data.sources.<name>.files` here (type jsonl)",
        "data.components.web.cache_dir": "`data.cache` here (one for all sources)",
        "trainer.tracker.type": "`trackers` here (a list)",  # a section below a row's key
    }.items(),
)
def test_keys_of_2026_with_names_and_sections_in_them_are_translated(option, told):
    assert f" is {told}" in refusal(f"--{option}", "1")


@pytest.mark.parametrize("text", ["[" * 1000, "&a [*a]"], ids=["deep", "of itself"])
def test_yaml_without_a_bottom_is_refused(text):
    assert "too deep in one another" in refusal("--data", text)


def test_a_section_knows_the_keys_that_it_was_not_given():
    config = load(TrainConfig, RAW | {"batch": {"size": 64}}, ["--model.experts.count", "4"])
    assert config.batch.left_out == {"type", "sequence_length", "microbatches"}, "64 is the default, and given"
    assert {"type", "layers"} < config.model.left_out
    assert "experts" not in config.model.left_out
    assert "active" in config.model.experts.left_out
    assert "type" not in load(TrainConfig, RAW, ["--model.type", "llama"]).model.left_out
