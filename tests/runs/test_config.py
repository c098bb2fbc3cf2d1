"""The configuration of a run: its mistakes, its way through YAML, and which of its fields a run may change."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import jax
import pytest

from gregale.checkpoint.files import arrays_by_name
from gregale.cli import PROGRAMS
from gregale.codecs.codec import ReduceConfig
from gregale.data.config import DataConfig
from gregale.data.sources import TextSource
from gregale.data.tokenizers import BpeConfig
from gregale.errors import KeyedError, UserError
from gregale.islands.config import IslandsConfig
from gregale.islands.protocol.messages import timing_of
from gregale.methods.config import DilocoConfig, SyncConfig
from gregale.model.config import Llama3Scaling
from gregale.model.llama import LlamaConfig
from gregale.optim.config import AdamWConfig, GroupConfig, LionConfig, OptimizerConfig, SgdConfig
from gregale.optim.schedules import ConstantSchedule
from gregale.runs.config import BatchConfig, DistributedConfig, EvaluationConfig, SamplesConfig, TrainConfig
from gregale.runs.parsing import dump, load
from gregale.runs.stages import changes
from gregale.settings import Settings
from gregale.settings.decoding import choices, entries, is_registry, known_entries, section_of, type_name, types_of
from gregale.tracking.trackers import TensorBoardConfig, WandbConfig

BASE = TrainConfig("a", 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig("", 1), "name is ''; it names a directory"),
        (lambda: TrainConfig("a/b", 1), "name is 'a/b'"),
        (lambda: TrainConfig("--fresh", 1), "name is '--fresh'; what begins with '-' is an option"),
        (lambda: TrainConfig("a\x1b[2Jb", 1), "name is 'a\\x1b[2Jb'; the character U+001B in it controls terminals."),
        (lambda: TrainConfig("a", 1, runs=""), "runs is empty; give a folder"),
        (lambda: DataConfig(sources={"": TextSource()}), "sources has a source whose name is empty"),
        (
            lambda: TrainConfig("a", 1, trackers=[TensorBoardConfig(), WandbConfig(), TensorBoardConfig()]),
            "trackers.2.type is tensorboard, and so is trackers.0.type; leave one of them out.",
        ),
        (lambda: DistributedConfig("a:1", 2, 2), "process is 2; the 2 processes have the numbers 0 to 1."),
        (lambda: DistributedConfig("here"), "coordinator is 'here'; it has to be HOST:PORT"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_names_its_key(make, message):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_text_for_validation_is_enough_to_evaluate_on():
    text, asked = replace(BASE.data, held_out=0.0, validation={"news": TextSource()}), EvaluationConfig(5, bigram=True)
    replace(BASE, data=text, evaluation=asked, reduce=ReduceConfig("int8", measure=True))


def test_every_choice_comes_back_from_yaml(tmp_path):
    configs = [replace(BASE, optimizer=choice()) for choice in OptimizerConfig.get_known_choices().values()]
    configs += [replace(BASE, sync=choice()) for choice in SyncConfig.get_known_choices().values()]
    configs.append(replace(BASE, samples=SamplesConfig(["a: b", ""]), evaluation=EvaluationConfig(every=3)))
    for config in configs:
        (tmp_path / "config.yaml").write_text(dump(config))
        assert load(TrainConfig, tmp_path / "config.yaml") == config


def forbidden(before: TrainConfig, now: TrainConfig) -> list[str]:
    return [str(change) for change in changes(before, now) if change.fixed]


def test_what_may_change_forbids_nothing_and_is_told():
    changed = replace(
        BASE,
        steps=20,
        runs="elsewhere",
        mesh=replace(BASE.mesh, replica=2),
        batch=BatchConfig(size=32, microbatches=2),
        optimizer=AdamWConfig(learning_rate=0.5, betas=(0.8, 0.9), clip_norm=None, schedule=ConstantSchedule()),
        data=replace(BASE.data, cache="other", workers=3, validation={"news": TextSource()}),
    )
    assert forbidden(BASE, changed) == []
    told = [str(change) for change in changes(BASE, changed)]
    assert len(told) == 13
    for part in (
        "optimizer.learning_rate 0.001 -> 0.5",
        "optimizer.schedule.type cosine -> constant",
        "optimizer.betas [0.9, 0.95] -> [0.8, 0.9]",
        "optimizer.clip_norm 1.0 -> null",
    ):
        assert part in told


def test_what_fixes_the_state_is_forbidden():
    changed = replace(
        BASE,
        seed=1,
        model=LlamaConfig(layers=2, mlp=64, init_scale=0.1, rotary_scaling=Llama3Scaling()),
        batch=BatchConfig(sequence_length=32),
        optimizer=LionConfig(),
    )
    keys = "seed model.layers model.mlp model.rotary_scaling batch.sequence_length optimizer.type"
    assert [found.split()[0] for found in forbidden(BASE, changed)] == keys.split()
    assert "optimizer.type adamw -> lion" in forbidden(BASE, changed)
    with_momentum, without = (replace(BASE, optimizer=SgdConfig(momentum=momentum)) for momentum in (0.9, 0.0))
    assert forbidden(with_momentum, without) == ["optimizer.momentum 0.9 -> 0.0"]
    assert forbidden(with_momentum, replace(BASE, optimizer=SgdConfig(momentum=0.5))) == []


def test_what_orders_the_data_is_forbidden_and_where_it_lies_is_not():
    def of(**changes: Any) -> TrainConfig:
        source = TextSource(files=("a/*.txt",), **changes)
        return replace(BASE, data=replace(BASE.data, sources={"text": source}))

    assert forbidden(of(), of(weight=2.0)) == [], "the source goes on where it has stopped"
    moved = replace(of(), data=replace(of().data, sources={"text": TextSource(files=("b/*.txt",))}, workers=2))
    assert forbidden(of(), moved) == []
    assert forbidden(of(), replace(of(), data=replace(of().data, shuffle=False))) == ["data.shuffle true -> false"]
    other = replace(of(), data=replace(of().data, tokenizer=BpeConfig(), held_out=0.0))
    keys = ["data.tokenizer.type", "data.tokenizer.vocabulary", "data.held_out"]
    assert [found.split()[0] for found in forbidden(of(), other)] == keys


def test_another_way_to_keep_replicas_together_begins_anew():
    def of(momentum: float) -> TrainConfig:
        return replace(BASE, sync=DilocoConfig(outer=SgdConfig(momentum=momentum)))

    assert [str(change) for change in changes(of(0.9), of(0.0))] == ["sync.outer.momentum 0.9 -> 0.0"]
    assert forbidden(of(0.9), of(0.0)) == []
    assert forbidden(of(0.9), BASE) == []


ANOTHER = {
    "learning_rate": 0.03,
    "schedule": ConstantSchedule(warmup=2),
    "weight_decay": 0.0,
    "decay": "all",
    "clip_norm": None,
    "betas": (0.5, 0.6),
    "epsilon": 1e-3,
    "nesterov": "other",
    "momentum": 0.5,
    "iterations": 2,
    "heads": True,
    "qk_clip": 100.0,
    "rms": None,
    "adamw_learning_rate": 0.1,
    "clip_update_norm": 3.0,
    "groups": (GroupConfig("*", learning_rate=0.5),),
}


@pytest.mark.parametrize("name", OptimizerConfig.get_known_choices())
def test_what_may_change_of_an_optimizer_leaves_the_form_of_its_state(name):
    """So a checkpoint of before can be restored: the same arrays under the same names."""
    parameters = {"matrix": jax.ShapeDtypeStruct((4, 8), "float32"), "scale": jax.ShapeDtypeStruct((4,), "float32")}

    def arrays(config: OptimizerConfig) -> dict:
        optimizer = config.build(parameters, steps=100)
        state = jax.eval_shape(lambda: (optimizer.sharded.init(parameters), optimizer.gathered.init(parameters)))
        return {key: (leaf.shape, leaf.dtype) for key, leaf in arrays_by_name(state).items()}

    config = OptimizerConfig.get_known_choices()[name]()
    for each in fields(config):
        if each.name in ("moments", "momentum_warmup") or (name, each.name) in (
            ("muon", "clip_update_norm"),
            ("muon", "adamw"),
        ):  # fixed
            continue
        value = not getattr(config, each.name) if ANOTHER[each.name] == "other" else ANOTHER[each.name]
        assert value != getattr(config, each.name) or each.name == "weight_decay"
        assert arrays(replace(config, **{each.name: value})) == arrays(config), each.name


def stated(config_class: Any) -> list[Any]:
    """All fields of a configuration with their class, each once, of all choices."""
    found: dict[Any, list] = {}
    waiting = [config_class]
    while waiting:
        kind = waiting.pop()
        waiting += [argument for argument in get_args(kind) if argument is not kind]
        if is_registry(kind):
            waiting += [choice for choice in choices(kind).values() if choice not in found]
        if is_dataclass(kind) and kind not in found:
            found[kind] = list(fields(kind))
            waiting += types_of(kind).values()
    return [(kind, each) for kind, own in found.items() for each in own]


CONFIGS = [TrainConfig, *(program.command.options for program in PROGRAMS.values())]


def test_every_number_states_its_range_and_is_checked_against_it():
    for kind, each in (found for config_class in CONFIGS for found in stated(config_class)):
        words = type_name(types_of(kind)[each.name]).replace("[", " ").replace(",", " ").split()
        if {"int", "float"} & set(words) and "mapping" not in words:
            assert "range" in each.metadata, (kind, each.name)
        if {"range", "choices"} & set(each.metadata):
            assert issubclass(kind, Settings), kind


def test_every_key_says_what_it_means_and_no_two_beside_one_another_have_a_name_in_common():
    every = [*entries(TrainConfig), *known_entries(TrainConfig).values()]  # the latter with names of other projects
    owners: dict[tuple[str, str], str] = {}  # section and name -> key
    for entry in every:
        assert entry.help, entry.key
        above, _, name = section_of(entry.key).rpartition(".")  # aliases of a `type` are also its section's
        for each in (name, *entry.aliases):
            assert owners.setdefault((above, each), entry.key) == entry.key, (each, entry.key)


def test_seconds_of_islands_are_those_of_the_network_but_what_is_given():
    lan, wan = timing_of(IslandsConfig()), timing_of(IslandsConfig(network="wan", reduce_seconds=7.0))
    assert (lan.heartbeat_seconds, wan.heartbeat_seconds) == (2.0, 10.0)
    assert (wan.reduce_seconds, wan.grace_seconds) == (7.0, None)
    assert lan.heal_seconds < wan.heal_seconds


def test_names_and_addresses_of_islands_are_checked():
    for name in ("", "a b", "-a", "x" * 65, "a/b"):
        with pytest.raises(KeyedError, match="name"):
            IslandsConfig(name=name)
    with pytest.raises(KeyedError, match="HOST:PORT"):
        IslandsConfig(lighthouse="oslo")
    assert IslandsConfig(lighthouse="oslo:29510").lighthouse == "oslo:29510"
    for bind in ("10.8.0.2:\u0662\u0669", "10.8.0.2:70000", "10.8.0.2:port", "fd00::1", ":29511", "0.0.0.0", "oslo:"):
        with pytest.raises(KeyedError, match="HOST or HOST:PORT"):
            IslandsConfig(bind=bind)
    assert all(IslandsConfig(bind=bind).bind == bind for bind in ("10.8.0.2", "10.8.0.2:29511", "oslo"))
    assert IslandsConfig(bind="0.0.0.0:29511", address="oslo.example.org:29511")
    with pytest.raises(KeyedError, match=r"address is 'oslo'; it has to be HOST:PORT"):
        IslandsConfig(address="oslo")
