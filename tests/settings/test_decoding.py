"""What a configuration's mistakes are called: the whole key, where it was given, and what was likely meant."""

import pytest

from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.settings.config_schema import entries
from gregale.settings.decoding import known_entries
from gregale.settings.other_projects import MOST_SHOWN, counterparts, names_of, projects

RUN = ["--name", "a", "--steps", "100"]
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


MEANT = {
    "lr": "optimizer.learning_rate",
    "sync.outer.lr": "sync.outer.learning_rate",
    "beta1": "optimizer.betas",
    "optimizer.warmup": "optimizer.schedule.warmup",
    "sync.outer.schedule.warmup_steps": "sync.outer.schedule.warmup",
    "tokenizer": "data.tokenizer",
    "model.hiden": "model.hidden",
    "warmup_steps": "optimizer.schedule.warmup` or `sync.warmup_steps",
}


@pytest.mark.parametrize("key", MEANT)
def test_a_near_miss_names_the_likely_keys_and_no_other(key):
    found = refusal(*(DILOCO if key.startswith("sync") else []), f"--{key}", "1")
    assert f" Did you mean `{MEANT[key]}`? " in found


def test_every_name_in_other_programs_finds_its_key():
    for entry in known_entries(TrainConfig).values():
        for alias in entry.aliases if "<" not in entry.key else ():
            found = refusal(*DILOCO, f"--{entry.key.rpartition('.')[0]}.{alias}".replace("--.", "--"), "1")
            assert f"`{entry.key}`" in found.partition(" Valid keys ")[0], (alias, found)


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
        "here; `training.enable_cpu_offload` of torchtitan has no counterpart here. Valid keys at the top: adapter, "
    ) in found
    found = refusal("--eval_steps", "1")  # of MaxText: batches; of transformers: steps between evaluations
    assert "`eval_steps` of MaxText is `evaluation.batches` here. Did you mean `evaluation.every`? Valid" in found
    found = refusal("--per-device-batch-size", "1")
    assert "` of MaxText is `batch.size` here (times devices times gradient_accumulation_steps). Valid keys" in found
    for name in ("capacity_factor", "moe_expert_capacity_factor"):
        found = refusal(f"--model.experts.{name}", "1.25")
        assert "`capacity_factor` of MaxText has no counterpart here (no token is dropped, " in found
    trainer = [f"--{row.theirs}=1" for row in counterparts() if row.theirs.startswith("trainer.")]
    assert f"; docs/migration.md has {len(trainer) - MOST_SHOWN} more of these keys. Valid" in refusal(*trainer)


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


@pytest.mark.parametrize("key", ["foo", "device", "epochs", "x", "model.x", "optimizer.foo"])
def test_nothing_silly_is_suggested(key):
    assert "Did you mean" not in refusal(f"--{key}", "1")


@pytest.mark.parametrize("text", ["[" * 2000, "&a [*a]"], ids=["deep", "of itself"])
def test_yaml_without_a_bottom_is_refused(text):
    assert "too deep in one another" in refusal("--data", text)
