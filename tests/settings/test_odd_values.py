"""Every key of every command with values that nobody means: a configuration comes of it, or one paragraph."""

import re
import traceback
from dataclasses import fields
from pathlib import Path

import pytest

from gregale.cli import PROGRAMS
from gregale.errors import UserError
from gregale.methods.config import DilocoConfig
from gregale.programs.simulate import SimulateConfig
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.settings.decoding import Entry, entries

ODD = [
    *("0", "-1", "1", "2", "0.5", "-0.0", "1e-320", "1e308", "1e400", "2147483648", "18446744073709551616"),
    *("-9223372036854775808", "12345678901234567890", "9" * 400, "9" * 5000, ".nan", ".inf", "-.inf", "nan"),
    *("null", "true", "", "a", "\u00e9\U0001f409", '"\\0"', '"\\ud800"', "2024-02-31", "!!bool maybe", "x" * 300),
    *("[]", "[1, 2]", "[null]", "{}", "{a: 1}", "{type: text}", "{", "&a [*a]", "a: b: c"),
    *('"\u0663"', "!own [1]", "!!set {a}", "[2, 2]", "1e22"),
]
FEW = ["0", "-1", "2", "0.5", "1e308", "18446744073709551616", "9" * 400, "null", "", '"\\0"', "[1, 2]", "{a: 1}"]
CLASSES = [TrainConfig, *(program.command.options for program in PROGRAMS.values())]
NEEDED = {"name": "odd", "steps": "1000", "run": "odd", "source": "odd", "target": "odd"}


def given(config_class: type, entry: Entry) -> list[str]:
    """What else has to be given for a key to exist: the fields without a default, and choices."""
    arguments = [f"--{each.name}={NEEDED[each.name]}" for each in fields(config_class) if each.name in NEEDED]
    if entry.key.startswith("sync."):
        arguments.append("--sync.type=streaming_diloco")
    chosen, _, names = entry.choice.partition(" ")
    if chosen and chosen != "sync.type":
        arguments.append(f"--{named(chosen)}={names.split(', ')[0]}")
    elif entry.key.startswith("data.sources.<name>.") and not entry.key.endswith("type"):
        arguments.append("--data.sources.web.type=text")
    return arguments


PLAIN = re.compile(r"(list of |mapping of names to )*(int|float|str|bool|path|null|mapping|any value|\[.*)")


def kind(entry: Entry) -> frozenset[str]:
    """What decides how a value is decoded: the type, in which all sets of choices are one."""
    parts = entry.type.split(" | ")
    found = {each if PLAIN.fullmatch(each) else f"{'list of ' * each.startswith('list of ')}choice" for each in parts}
    return frozenset(found | ({"registry"} if entry.key.endswith("type") else set()))


def named(key: str) -> str:
    return key.replace("<name>", "web")


def as_yaml(key: str, value: str) -> str:
    *above, last = named(key).split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(above)]
    return "\n".join([*lines, f"{'  ' * len(above)}{last}: {value}"]) + "\n"


def use(config: TrainConfig) -> None:
    """What is cheap of setting a run up, and its way through a file."""
    config.optimizer.build_schedule(config.optimizer.learning_rate, config.steps)
    if isinstance(config.sync, DilocoConfig):
        config.sync.outer.build_schedule(config.sync.outer.learning_rate, config.steps)
        config.sync.schedule(layers=12)
    config.mesh.sizes(8)
    config.reduce.first_codec(), config.reduce.second_codec()
    if config.pipeline is not None:
        config.pipeline.schedule(2)


def outcome(config_class: type, path: Path | None, arguments: list[str]) -> str:
    """The paragraph; empty if there is a configuration; a traceback for anything else."""
    try:
        config = load(config_class, path, arguments)
        if isinstance(config, TrainConfig):
            use(config)
    except UserError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return ""


def test_no_value_of_any_key_ends_in_a_traceback(tmp_path):
    """Each key with a few values on the command line; the first of each type with all, in a file too."""
    path, loaded, types = tmp_path / "odd.yaml", 0, set()
    for config_class, entry in ((each, entry) for each in CLASSES for entry in entries(each)):
        others = given(config_class, entry)
        is_new = kind(entry) not in types
        types.add(kind(entry))
        for value in ODD if is_new else FEW:
            ways = [(None, [*others, f"--{named(entry.key)}={value}"])]
            if is_new:
                path.write_text(as_yaml(entry.key, value), encoding="utf-8")
                ways.append((path, [other for other in others if not other.startswith(f"--{named(entry.key)}=")]))
            for file, arguments in ways:
                found = outcome(config_class, file, arguments)
                assert "\n" not in found, (entry.key, value[:40], file, found)
                assert len(found) < 1500, (entry.key, value[:40], file, found)
                loaded += not found
    assert loaded > 500


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", '"\u0663"', "`steps`.* is '\u0663', a str; expected int"),
        ("optimizer.learning_rate", "\uff11", "`optimizer.learning_rate`.* is '\uff11', a str; expected float"),
        ("data.sources", "!own {x: {type: text}}", "the tag !own is unknown here; remove it"),
        ("evaluation.tasks", "!own [a]", "the tag !own is unknown here; remove it"),
        ("evaluation.tasks", "!!python/tuple [a]", "the tag !!python/tuple is unknown here; remove it"),
        ("evaluation", "{!own every: 3}", "the tag !own is unknown here; remove it"),
        ("evaluation.sequence_lengths", "[64, 32, 64]", "evaluation.sequence_lengths has 64 twice"),
        ("evaluation.sequence_lengths", "[1]", r"evaluation.sequence_lengths.0 is 1.*; it has to be at least 2"),
        ("model", "{sliding_window: 8, layers: 2, full_layers: [0, 0]}", "model.full_layers has 0 twice"),
        ("model.norm_epsilon", "1e22", r"model.norm_epsilon is 1e\+22.*; it has to be above 0 and at most 1"),
        ("optimizer.epsilon", "1e22", r"optimizer.epsilon is 1e\+22.*; it has to be above 0 and at most 1"),
        ("distributed.coordinator", "a:\u0663", "distributed.coordinator is .* it has to be HOST:PORT"),
        ("islands.lighthouse", "'3'", "islands.lighthouse is .* it has to be HOST:PORT"),
        ("islands.lighthouse", "[a:1, a:1]", "islands.lighthouse is .* a list of different ones"),
        ("data.sources.x", "{type: csv, header: false, column: '\u0663'}", "give its number, from 1"),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(tmp_path, key, value, message):
    (tmp_path / "odd.yaml").write_text(as_yaml(key, value), encoding="utf-8")
    arguments = [f"--{name}={NEEDED[name]}" for name in ("name", "steps") if name != key]
    assert re.search(message, outcome(TrainConfig, tmp_path / "odd.yaml", arguments))


def test_each_method_and_bandwidth_of_a_simulation_counts_once():
    for arguments in ("--methods=psdp,psdp", "--bandwidth=1,2,1"):
        assert re.search("twice.*; give each of its values once", outcome(SimulateConfig, None, [arguments]))
